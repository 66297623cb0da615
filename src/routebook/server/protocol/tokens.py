"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from routebook.server.protocol.base import Body
from routebook.server.protocol.chat import ChatMessage


class TokenizeRequest(Body):
    """A text, or a conversation, to make token ids of; one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Token ids to make a text of."""

    model: str | None = None
    tokens: list[int]
