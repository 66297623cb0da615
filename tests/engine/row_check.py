"""Comparing a completion with what it had to be, row by row.

Legend of shape suffixes: T = rows of a record, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from routebook.engine.outputs import CompletionOutput
from routebook.engine.request import FinishReason
from routebook.engine.sampling_params import SamplingParams
from routebook.routes import Origin, RoutedExperts
from routebook.routes.provenance import rows_of_provenance
from tests.engine.tagged_worker import TaggedWorker, name_of_row, number_of, tagged_rows
from tests.engine.totals import Totals
from tests.engine.witness import Computation, Witness


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked of the engine."""

    token_ids: list[int]
    params: SamplingParams
    earlier: RoutedExperts | None = None
    forced: bool = False


class RowSource(Protocol):
    """Knows the row of every computation."""

    def rows_of(self, computations: Sequence[Computation]) -> np.ndarray:
        """Ids `[len(computations), L, K]`."""

    def name(self, row_LK: np.ndarray) -> str:
        """Whose row this is, as far as it can be told."""


class TaggedRows:
    """Rows of the fake worker, which follow from the computation; it notes itself which were forced on it."""

    def __init__(self, worker: TaggedWorker) -> None:
        self._forced = worker.forced

    def rows_of(self, computations: Sequence[Computation]) -> np.ndarray:
        rows_TLK = tagged_rows(
            [number_of(c.maker) for c in computations],
            [c.position for c in computations],
            [c.forward for c in computations],
        )
        for t, c in enumerate(computations if self._forced else ()):
            forced = self._forced.get((c.forward, c.maker, c.position))
            if forced is not None:
                rows_TLK[t] = forced
        return rows_TLK

    def name(self, row_LK: np.ndarray) -> str:
        return name_of_row(row_LK)


def check_record(
    request_id: str,
    asked: Asked,
    choice: CompletionOutput,
    *,
    witness: Witness,
    source: RowSource,
    num_taken: int,
    totals: Totals,
) -> None:
    """Every position has the row of the computation that the witness names; the others have none.

    Args:
        request_id: the completion's.
        asked: by the caller.
        choice: what came back.
        witness: saw every step that ran.
        source: knows their rows.
        num_taken: steps whose results had been taken when the completion ended.
        totals: counts what was compared.
    """
    record = choice.routed_experts
    if not asked.params.routed_experts:
        assert record is None
        return
    assert record is not None
    token_ids = [*asked.token_ids, *choice.token_ids]
    start, stop = _span(asked, len(token_ids) - 1)
    assert (record.start, record.stop) == (start, stop), "not a row for every token but the last"
    record.check_tokens(token_ids)
    computed = list(witness.computations(request_id, start, stop, num_taken))
    wanted = _expected(record, computed, len(asked.token_ids), witness, source)
    if asked.earlier is not None:
        totals.rows_earlier += _put_earlier(wanted, asked.earlier)
    _compare(request_id, record, wanted, source)
    if choice.finish_reason is not FinishReason.ABORT or choice.token_ids:
        assert record.complete, f"{request_id} lacks rows, and nobody says why"
    totals.rows += int(record.valid_T.sum())
    totals.rows_absent += int((~record.valid_T).sum())
    totals.rows_recomputed += int((wanted.origin_T == Origin.RECOMPUTED).sum())
    totals.rows_found += int((wanted.origin_T == Origin.PREFIX_CACHE).sum())


def _span(asked: Asked, num_rows: int) -> tuple[int, int]:
    if asked.earlier is not None:
        return asked.earlier.start, max(num_rows, asked.earlier.stop)
    return min(asked.params.routed_experts_prompt_start, num_rows), num_rows


@dataclass(slots=True)
class _Rows:
    """Rows with their provenance; absent where the origin says so."""

    ids_TLK: np.ndarray
    origin_T: np.ndarray
    version_T: np.ndarray


def _expected(
    record: RoutedExperts,
    computed: list[Computation | None],
    num_prompt_tokens: int,
    witness: Witness,
    source: RowSource,
) -> _Rows:
    ids_TLK = np.full(record.schema.shape(len(computed)), record.schema.absent, np.int64)
    origin_T, version_T = np.zeros(len(computed), np.int64), np.zeros(len(computed), np.int64)
    places = [t for t, computation in enumerate(computed) if computation is not None]
    present = [computation for computation in computed if computation is not None]
    if present:
        ids_TLK[places] = source.rows_of(present)
        version_T[places] = [witness.versions[c.forward] for c in present]
        origin_T[places] = [_origin(c, num_prompt_tokens) for c in present]
    return _Rows(ids_TLK, origin_T, version_T)


def _origin(computation: Computation, num_prompt_tokens: int) -> Origin:
    if not computation.is_own:
        return Origin.PREFIX_CACHE
    if computation.is_recomputed:
        return Origin.RECOMPUTED
    return Origin.PREFILL if computation.position < num_prompt_tokens else Origin.DECODE


def _put_earlier(wanted: _Rows, earlier: RoutedExperts) -> int:
    """Rows of the aborted run come before those of this one; returns how many there are."""
    origin_T, version_T = rows_of_provenance(earlier.provenance, earlier.start, earlier.num_rows)
    places = np.flatnonzero(earlier.valid_T)
    wanted.ids_TLK[places] = earlier.ids_TLK[places]
    wanted.origin_T[places], wanted.version_T[places] = origin_T[places], version_T[places]
    return len(places)


def _compare(request_id: str, record: RoutedExperts, wanted: _Rows, source: RowSource) -> None:
    origin_T, version_T = rows_of_provenance(record.provenance, record.start, record.num_rows)
    wrong_T = (record.ids_TLK != wanted.ids_TLK).any(axis=(1, 2))
    wrong_T |= (origin_T != wanted.origin_T) | (version_T != wanted.version_T)
    if not wrong_T.any():
        return
    t = int(wrong_T.argmax())

    def described(ids_LK: np.ndarray, origin: int, version: int) -> str:
        if origin == Origin.ABSENT:
            return "no row"
        return f"{source.name(ids_LK)}, {Origin(origin).name}, version {version}"

    raise AssertionError(
        f"request {request_id}, position {record.start + t}:"
        f"\n  got    {described(record.ids_TLK[t], int(origin_T[t]), int(version_T[t]))}"
        f"\n  wanted {described(wanted.ids_TLK[t], int(wanted.origin_T[t]), int(wanted.version_T[t]))}"
    )


def check_forced(request_id: str, asked: Asked, witness: Witness, source: RowSource) -> None:
    """Whenever a forced request computed a token that its record has a row for, it took that row."""
    earlier = asked.earlier
    assert earlier is not None
    for run in witness.runs(request_id):
        computations = [
            Computation(maker=request_id, position=position, forward=forward, is_own=True)
            for position, forward in enumerate(run.forwards[: earlier.stop])
            if earlier.valid_T[position]
        ]
        if computations:
            rows = earlier.ids_TLK[[c.position for c in computations]]
            np.testing.assert_array_equal(source.rows_of(computations), rows)
