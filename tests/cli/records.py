"""Records made from others, for the tests of `inspect` and `verify`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from routebook.routes import Origin, RoutedExperts, RouteSample, RoutesWriter


def write(path: Path, samples: Iterable[RouteSample]) -> Path:
    with RoutesWriter(path) as writer:
        for sample in samples:
            writer.write(sample)
    return path


def with_ids(sample: RouteSample, position: int, layer: int, ids: list[int]) -> RouteSample:
    """The sample with one row of one layer replaced."""
    ids_TLK = sample.record.ids_TLK.copy()
    ids_TLK[position - sample.record.start, layer] = ids
    return replace(sample, record=replace(sample.record, ids_TLK=ids_TLK))


def without_rows(sample: RouteSample, positions: Iterable[int]) -> RouteSample:
    """The sample with the rows at some positions absent."""
    origin_T = np.full(sample.record.num_rows, Origin.DECODE, np.uint8)
    origin_T[[position - sample.record.start for position in positions]] = Origin.ABSENT
    record = RoutedExperts.from_rows(
        sample.record.schema,
        sample.record.ids_TLK,
        sample.token_ids,
        sample.record.start,
        origin_T=origin_T,
    )
    return replace(sample, record=record)


def with_meta(sample: RouteSample, **meta: str) -> RouteSample:
    return replace(sample, meta=sample.meta | meta)
