"""The sums: every addition of two numbers below 100, some of them kept back to test with."""

from __future__ import annotations

import random
from collections.abc import Iterator

SEED = 20
HELDOUT_SHARE = 0.10
MOST_LINES = 24


def heldout_pairs() -> list[tuple[int, int]]:
    """The two-digit pairs that no training text holds, in either order.

    Both orders go together: a model that saw 25+17 has been told 17+25.
    """
    unordered = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    chosen = random.Random(SEED).sample(unordered, round(HELDOUT_SHARE * len(unordered)))
    return sorted({pair for a, b in chosen for pair in ((a, b), (b, a))})


def training_pairs() -> list[tuple[int, int]]:
    """Every other pair of numbers from 0 to 99."""
    kept_back = set(heldout_pairs())
    pairs = ((a, b) for a in range(100) for b in range(100))
    return [pair for pair in pairs if pair not in kept_back]


def line(a: int, b: int) -> str:
    """One sum as the model reads it: the prompt `17+25=` goes on with `42` and a newline."""
    return f"{a}+{b}={a + b}\n"


def training_documents(equations: int, seed: int) -> Iterator[str]:
    """Documents of 1 to 24 random sums, until `equations` sums have been written."""
    rng, pairs = random.Random(seed), training_pairs()
    while equations > 0:
        lines = min(rng.randint(1, MOST_LINES), equations)
        equations -= lines
        yield "".join(line(*rng.choice(pairs)) for _ in range(lines))


def heldout_documents(seed: int) -> Iterator[str]:
    """Every held-out sum once, in documents like those of training."""
    rng, pairs = random.Random(seed), heldout_pairs()
    rng.shuffle(pairs)
    while pairs:
        lines = rng.randint(1, MOST_LINES)
        yield "".join(line(*pair) for pair in pairs[:lines])
        pairs = pairs[lines:]
