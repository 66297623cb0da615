"""What a generation over HTTP gives, whole or piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from routebook.routes import RoutedExperts, RouteSample


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One completion of a prompt."""

    index: int
    text: str | None
    """Without the stop text; None if only tokens were asked for."""
    token_ids: tuple[int, ...]
    """All generated tokens."""
    finish_reason: str
    """`stop`, `length`, or `abort`."""
    stop_reason: int | str | None
    logprobs: dict[str, Any] | None
    """As the server tells them, `{"content": [...]}`, if asked for."""
    routed_experts: RoutedExperts | None
    """Rows of positions `[routed_experts_prompt_start, P + C - 1)`, if asked for; None also where the completion was
    aborted before its first token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A prompt and its completions."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]

    def samples(self) -> list[RouteSample]:
        """Each completion that has rows with its tokens, as it is written to a `.routes` file."""
        return [self._sample(choice) for choice in self.choices if choice.routed_experts]

    def _sample(self, choice: Choice) -> RouteSample:
        assert choice.routed_experts is not None
        meta = {"request_id": self.request_id, "index": str(choice.index)}
        if choice.text is not None:
            meta["text"] = choice.text
        return RouteSample(
            record=choice.routed_experts,
            token_ids=[*self.prompt_token_ids, *choice.token_ids],  # type: ignore[arg-type]
            num_prompt_tokens=len(self.prompt_token_ids),
            meta=meta,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceDelta:
    """What became known of one completion."""

    index: int
    text: str | None
    token_ids: tuple[int, ...]
    """New tokens."""
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: dict[str, Any] | None
    routed_experts: RoutedExperts | None
    """Exactly the rows that became known. They follow those of the delta before; the prompt's rows come first. With
    `n > 1` completions other than the first leave out prompt rows that they share with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationChunk:
    """One event of a stream."""

    request_id: str
    choices: tuple[ChoiceDelta, ...]
