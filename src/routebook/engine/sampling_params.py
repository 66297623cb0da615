"""What one request asks for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

import msgspec

from routebook.config import option
from routebook.errors import RequestError

_MOST_COMPLETIONS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to generate, when to stop, and whether to hand out the routed experts.

    Raises:
        RequestError: a value that cannot work, with the value and the remedy.
    """

    n: int = option("completions per prompt", default=1)
    max_tokens: int = option("tokens to generate at most", default=128)
    temperature: float = option("softness of the choice; 0 takes the likeliest token", default=1.0)
    top_k: int = option("sample among this many likeliest tokens; 0 means all", default=0)
    top_p: float = option(
        "sample among the likeliest tokens of this total probability", default=1.0
    )
    min_p: float = option(
        "drop tokens below this share of the likeliest one's probability", default=0.0
    )
    seed: int | None = option(
        "same seed, same choices; unset draws one from base_seed", default=None
    )
    stop: tuple[str, ...] = option("texts that end the completion; they are cut off", default=())
    stop_token_ids: tuple[int, ...] = option("token ids that end the completion", default=())
    include_stop_text: bool = option(
        "keep the stop text, or the end-of-sequence token, at the end of the text", default=False
    )
    skip_special_tokens: bool = option("leave special tokens out of the text", default=True)
    ignore_eos: bool = option("go on past the end-of-sequence token", default=False)
    logprobs: int | None = option(
        "log-probabilities: 0 of the sampled tokens, N also of the N likeliest; unset gives none",
        default=None,
    )
    routed_experts: bool = option("hand out the routed experts of every token", default=True)
    routed_experts_prompt_start: int = option("position of the first row handed out", default=0)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        self._check_types()
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_counts()
        self._check_shares()

    def _check_types(self) -> None:
        for name, hint in _type_hints().items():
            try:
                msgspec.convert(getattr(self, name), type=hint)
            except msgspec.ValidationError as error:
                raise RequestError(f"{name}={getattr(self, name)!r}: {error}") from error

    def _check_counts(self) -> None:
        least = {
            "n": 1,
            "max_tokens": 1,
            "top_k": 0,
            "routed_experts_prompt_start": 0,
        }
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise RequestError(f"{name}={getattr(self, name)} must be at least {bound}")
        if self.n > _MOST_COMPLETIONS:
            raise RequestError(f"n={self.n} must be at most {_MOST_COMPLETIONS}; ask several times")
        if self.logprobs is not None and self.logprobs < 0:
            raise RequestError(f"logprobs={self.logprobs} must be at least 0, or unset for none")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise RequestError(f"seed={self.seed} must lie in [0, 2**63)")
        if any(not text for text in self.stop):
            raise RequestError("stop holds an empty text, which would end every completion at once")

    def _check_shares(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature={self.temperature} must be a number of at least 0")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p={self.top_p} must lie in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise RequestError(f"min_p={self.min_p} must lie in [0, 1]")


@cache
def _type_hints() -> dict[str, Any]:
    """Types of the fields; finding them out takes longer than all checks of a request."""
    return get_type_hints(SamplingParams)
