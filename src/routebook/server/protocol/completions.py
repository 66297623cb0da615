"""`/v1/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from routebook.server.protocol.base import Off, One, OpenAIBody

_MOST_PROMPTS = 1024

TokenIds = list[int]
Prompts = (
    str
    | Annotated[list[int], Field(min_length=1)]
    | Annotated[list[str], Field(min_length=1, max_length=_MOST_PROMPTS)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=_MOST_PROMPTS)]
)


class CompletionRequest(OpenAIBody):
    """Texts or token ids to complete."""

    prompt: Prompts
    max_tokens: int | None = 16
    logprobs: int | None = None
    add_special_tokens: bool = True
    best_of: One = None
    echo: Off = None
    suffix: None = None
    prompt_embeds: None = None
