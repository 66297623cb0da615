"""Where each row came from: which weights computed it, and by which way it reached the record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from routebook.errors import SpanError

_MAX_VERSION = 2**32 - 1


class Origin(IntEnum):
    """How a row came to be in a record. `ABSENT` marks a position that has no row."""

    ABSENT = 0
    PREFILL = 1
    DECODE = 2
    PREFIX_CACHE = 3
    RESTORED = 4
    TRANSFERRED = 5
    RECOMPUTED = 6
    """Computed by a later run of a preempted request, in place of a row that an earlier run had."""


ABSENT = int(Origin.ABSENT)
"""The same as a plain number: numpy asks the class of an enum for a dozen attributes at every comparison."""


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
    """Compress per-row origins and weight versions into maximal ranges.

    Absent rows have none.

    Args:
        origin_T: uint8 `[rows]`, values of :class:`Origin`.
        version_T: uint32 `[rows]`, weight version of each row.
        start: position of the first row.
    """
    if not len(origin_T):
        return ()
    edges = [0, len(origin_T)]
    if len(origin_T) > 1:
        changes = np.flatnonzero((np.diff(origin_T) != 0) | (np.diff(version_T) != 0)) + 1
        edges[1:1] = changes.tolist()
    return tuple(
        Provenance(start + a, start + b, int(version_T[a]), Origin(int(origin_T[a])))
        for a, b in pairwise(edges)
        if origin_T[a] != ABSENT
    )


def rows_of_provenance(
    spans: Sequence[Provenance], start: int, num_rows: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
    """Invert :func:`provenance_of_rows`: per-row origins and weight versions.

    Rows in no range are `ABSENT`, version 0.
    """
    origin_T = np.zeros(num_rows, np.uint8)
    version_T = np.zeros(num_rows, np.uint32)
    for span in spans:
        rows = slice(span.start - start, span.stop - start)
        origin_T[rows] = span.origin
        version_T[rows] = span.weight_version
    return origin_T, version_T


def clip_provenance(spans: Sequence[Provenance], start: int, stop: int) -> tuple[Provenance, ...]:
    """The parts of `spans` that lie in `[start, stop)`."""
    return tuple(
        replace(span, start=max(span.start, start), stop=min(span.stop, stop))
        for span in spans
        if max(span.start, start) < min(span.stop, stop)
    )


def merge_provenance(spans: Sequence[Provenance]) -> tuple[Provenance, ...]:
    """The same ranges, each as long as it can be, so that equal histories are equal tuples.

    Raises:
        SpanError: a range is empty, `ABSENT`, overlaps its predecessor or comes before it, or has a
            weight version outside `[0, 2**32)`.
    """
    merged: list[Provenance] = []
    for span in spans:
        _check_span(span, merged[-1].stop if merged else 0)
        if merged and _continues(merged[-1], span):
            merged[-1] = replace(merged[-1], stop=span.stop)
        else:
            merged.append(span)
    return tuple(merged)


def _check_span(span: Provenance, least_start: int) -> None:
    if not least_start <= span.start < span.stop:
        raise SpanError(f"{span} is empty, or begins before position {least_start}")
    if span.origin == Origin.ABSENT:
        raise SpanError(f"{span}: an absent row has no provenance; leave the range out")
    if not 0 <= span.weight_version <= _MAX_VERSION:
        raise SpanError(f"{span}: the weight version must lie in [0, 2**32)")


def _continues(last: Provenance, span: Provenance) -> bool:
    same = (last.weight_version, last.origin) == (span.weight_version, span.origin)
    return same and last.stop == span.start
