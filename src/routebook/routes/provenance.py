"""Where each row came from: which weights computed it, and by which way it reached the record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt


class Origin(IntEnum):
    """How a row came to be in a record. `ABSENT` marks a position that has no row."""

    ABSENT = 0
    PREFILL = 1
    DECODE = 2
    PREFIX_CACHE = 3
    RESTORED = 4
    TRANSFERRED = 5


@dataclass(frozen=True, slots=True)
class Provenance:
    """Rows `[start, stop)` share one origin and one version of the weights."""

    start: int
    stop: int
    weight_version: int
    origin: Origin


def provenance_of_rows(
    origin_T: npt.NDArray[np.uint8], version_T: npt.NDArray[np.uint32], start: int
) -> tuple[Provenance, ...]:
    """Compress per-row origins and weight versions into maximal ranges; absent rows have none.

    Args:
        origin_T: uint8 `[rows]`, values of :class:`Origin`.
        version_T: uint32 `[rows]`, weight version of each row.
        start: position of the first row.
    """
    if not len(origin_T):
        return ()
    changes = np.flatnonzero((np.diff(origin_T) != 0) | (np.diff(version_T) != 0)) + 1
    edges = [0, *changes.tolist(), len(origin_T)]
    return tuple(
        Provenance(start + a, start + b, int(version_T[a]), Origin(int(origin_T[a])))
        for a, b in zip(edges, edges[1:], strict=False)
        if origin_T[a] != Origin.ABSENT
    )


def rows_of_provenance(
    spans: Sequence[Provenance], start: int, num_rows: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
    """Invert :func:`provenance_of_rows`: per-row origins (`ABSENT` where no range lies) and versions."""
    origin_T = np.zeros(num_rows, np.uint8)
    version_T = np.zeros(num_rows, np.uint32)
    for span in spans:
        rows = slice(span.start - start, span.stop - start)
        origin_T[rows] = span.origin
        version_T[rows] = span.weight_version
    return origin_T, version_T
