from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routebook.errors import SpanError
from routebook.routes import Origin, Provenance
from routebook.routes.provenance import (
    clip_provenance,
    merge_provenance,
    provenance_of_rows,
    rows_of_provenance,
)

ROWS = st.lists(st.tuples(st.sampled_from(Origin), st.integers(0, 2)), max_size=12)


def test_the_numbers_of_origins_are_those_in_frames_that_exist() -> None:
    numbers = {
        "ABSENT": 0,
        "PREFILL": 1,
        "DECODE": 2,
        "PREFIX_CACHE": 3,
        "RESTORED": 4,
        "TRANSFERRED": 5,
        "RECOMPUTED": 6,
    }
    assert {origin.name: origin.value for origin in Origin} == numbers


def spans_of(rows: list[tuple[Origin, int]], start: int) -> tuple[Provenance, ...]:
    origins = np.array([origin for origin, _ in rows], np.uint8)
    versions = np.array([version for _, version in rows], np.uint32)
    return provenance_of_rows(origins, versions, start)


def by_position(spans: tuple[Provenance, ...]) -> dict[int, tuple[Origin, int]]:
    return {
        position: (span.origin, span.weight_version)
        for span in spans
        for position in range(span.start, span.stop)
    }


@given(ROWS, st.integers(0, 3))
def test_ranges_say_of_each_row_what_was_said_of_it(rows, start):
    said = {start + i: row for i, row in enumerate(rows) if row[0] != Origin.ABSENT}
    assert by_position(spans_of(rows, start)) == said


@given(ROWS, st.integers(0, 3))
def test_rows_survive_the_way_to_ranges_and_back(rows, start):
    origins, versions = rows_of_provenance(spans_of(rows, start), start, len(rows))
    assert origins.tolist() == [origin for origin, _ in rows]
    present = [i for i, (origin, _) in enumerate(rows) if origin != Origin.ABSENT]
    assert versions[present].tolist() == [rows[i][1] for i in present]


@given(ROWS, st.integers(0, 12), st.integers(0, 12))
def test_clipping_keeps_exactly_the_positions_within(rows, a, b):
    start, stop = sorted((a, b))
    spans = spans_of(rows, 0)
    inside = {p: row for p, row in by_position(spans).items() if start <= p < stop}
    clipped = clip_provenance(spans, start, stop)
    assert by_position(clipped) == inside
    assert merge_provenance(clipped) == clipped


@given(ROWS)
def test_merging_single_rows_gives_the_maximal_ranges(rows):
    singles = [
        Provenance(position, position + 1, version, origin)
        for position, (origin, version) in by_position(spans_of(rows, 0)).items()
    ]
    assert merge_provenance(singles) == spans_of(rows, 0)


@pytest.mark.parametrize(
    "spans",
    [
        [Provenance(2, 2, 0, Origin.DECODE)],
        [Provenance(-1, 2, 0, Origin.DECODE)],
        [Provenance(0, 3, 0, Origin.DECODE), Provenance(2, 4, 0, Origin.DECODE)],
        [Provenance(3, 4, 0, Origin.DECODE), Provenance(0, 1, 0, Origin.DECODE)],
        [Provenance(0, 1, 0, Origin.ABSENT)],
        [Provenance(0, 1, -1, Origin.DECODE)],
        [Provenance(0, 1, 2**32, Origin.DECODE)],
    ],
)
def test_ranges_that_cannot_be_are_refused(spans):
    with pytest.raises(SpanError):
        merge_provenance(spans)
