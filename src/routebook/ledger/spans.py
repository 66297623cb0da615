"""Maximal pieces of consecutive numbers, so that what lies side by side is copied at once.

Legend of shape suffixes: T = numbers.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]


def breaks(values_T: npt.NDArray[np.integer]) -> Index:
    """Where a value is not the one before plus one, int64."""
    return np.flatnonzero(values_T[1:] != values_T[:-1] + 1) + 1


def spans(values_T: npt.NDArray[np.integer], breaks: Index) -> list[tuple[int, int]]:
    """The maximal `[first, stop)` of places between breaks."""
    return list(pairwise([0, *breaks.tolist(), len(values_T)])) if len(values_T) else []
