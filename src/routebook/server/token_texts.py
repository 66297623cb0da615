"""Texts of single tokens."""

from __future__ import annotations

from typing import Any

from routebook.engine.step import TokenLogprobs

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has not."""


class TokenTexts:
    """Remembers the text of each token that was asked for; there are no more of them than the vocabulary has.

    Args:
        tokenizer: the model's, None without one.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._decode(token_id)
        return text

    def _decode(self, token_id: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        text: str = self._tokenizer.decode([token_id])
        return text


def as_json_number(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB


def sampled_first(entry: TokenLogprobs, num_likeliest: int) -> list[tuple[int, float]]:
    """The sampled token and the likeliest others, `max(1, num_likeliest)` in all."""
    others = [pair for pair in entry.top if pair[0] != entry.token_id]
    return [(entry.token_id, entry.logprob), *others][: max(1, num_likeliest)]


def rank_of(entry: TokenLogprobs, token_id: int) -> int | None:
    """Place of a token among the likeliest, from 1 on; None where it is not among those that were asked for."""
    return next((rank for rank, (other, _) in enumerate(entry.top, 1) if other == token_id), None)
