"""What a caller gets."""

from __future__ import annotations

from dataclasses import dataclass

from routebook.engine.request import FinishReason
from routebook.engine.step import TokenLogprobs
from routebook.routes import RoutedExperts


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    """Without the stop text or the end-of-sequence token, unless asked for; empty when the model has no tokenizer."""
    token_ids: tuple[int, ...]
    """All generated tokens, those of a stop text and the end-of-sequence token included."""
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop token id or stop text that ended it; the message of the error that did."""
    logprobs: tuple[TokenLogprobs, ...] | None
    """One per generated token, if asked for."""
    routed_experts: RoutedExperts | None
    """Rows of positions `[routed_experts_prompt_start, P + C - 1)`, if asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """A prompt and its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    choices: tuple[CompletionOutput, ...]
