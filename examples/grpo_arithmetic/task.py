"""The task: sums of two three-digit numbers, such as `371+486=857`.

The bundled model adds numbers below 100 almost without a mistake and has never seen larger ones. `warm_up` shows it
some and stops early, where it is right about every third time: GRPO then has something to learn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

MAX_TOKENS = 6
"""Tokens of a completion: four digits and the newline that ends it, and one to spare."""

_LEAST, _MOST = 100, 999


def prompts(count: int, seed: int) -> list[str]:
    """`count` random sums, each up to its equals sign."""
    return [f"{a}+{b}=" for a, b in pairs(count, seed)]


def pairs(count: int, seed: int) -> list[tuple[int, int]]:
    """`count` random pairs of three-digit numbers."""
    rng = random.Random(seed)
    return [(rng.randint(_LEAST, _MOST), rng.randint(_LEAST, _MOST)) for _ in range(count)]


def reward(prompt: str, completion: str) -> float:
    """1 if the completion is the sum and nothing else, else 0.

    TRL gives completions without the newline that ends them.
    """
    a, b = prompt.removesuffix("=").split("+")
    return float(completion == str(int(a) + int(b)))


def rewards(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
    """The same in the form that TRL asks for."""
    return [reward(*one) for one in zip(prompts, completions, strict=True)]
