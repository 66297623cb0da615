"""A step as it was scheduled, noted then, because request and blocks may have moved on when its rows come.

Legend of shape suffixes: R = requests of a step, T = rows, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from routebook.errors import LedgerError
from routebook.ledger import StepRows
from routebook.ledger.base import RouteIds

Counts = npt.NDArray[np.int64]

WEIGHT_VERSION = 0
"""vLLM does not number its weights; what it returns has no place for a version either."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a step: the rows `[start, start + count)` of one of its runs."""

    start: int
    count: int
    num_drafts: int
    """Tokens at the end of the rows that were guessed by speculation."""
    run: int

    def num_final(self, num_sampled: int) -> int:
        """How many of the rows were computed from tokens of the request: a rejected draft was never one.

        Args:
            num_sampled: tokens that the step gave the request: accepted drafts and one more, or none.
        """
        if not self.num_drafts:
            return self.count
        return self.count - self.num_drafts + max(num_sampled - 1, 0)


@dataclass(slots=True)
class StepPlan:
    """All requests of a step."""

    scheduler_output: Any
    """Kept, since the plan is found again by its identity."""
    requests: dict[str, PlannedRequest]
    dropped: set[str] = field(default_factory=set)
    """Requests whose part of the step vLLM throws away when it comes: they are computed anew."""

    def rows(
        self, request_ids: Sequence[str], sampled: Sequence[Sequence[int]], ids_TLK: RouteIds
    ) -> StoredStep:
        """Put the worker's rows together with the plan.

        Args:
            request_ids: in the order of the batch that ran, as the worker tells it.
            sampled: new tokens of each; empty if the step sampled nothing at all.
            ids_TLK: rows of all of them, drafts included.

        Raises:
            LedgerError: the worker ran other requests, or another number of rows, than planned.
        """
        if len(request_ids) != len(self.requests):
            raise LedgerError(f"{len(self.requests)} requests were planned, {len(request_ids)} ran")
        planned = [self.requests[request_id] for request_id in request_ids]
        counts_R = np.array([p.count for p in planned], np.int64)
        if int(counts_R.sum()) != len(ids_TLK):
            raise LedgerError(f"{int(counts_R.sum())} rows were planned, {len(ids_TLK)} came")
        num_sampled = [len(s) for s in sampled] or [0] * len(planned)
        kept_R = np.array(
            [
                0 if i in self.dropped else p.num_final(n)
                for i, p, n in zip(request_ids, planned, num_sampled, strict=True)
            ],
            np.int64,
        )
        if not np.array_equal(kept_R, counts_R):
            ids_TLK = ids_TLK[_kept_rows(counts_R, kept_R)]
        step = StepRows(
            request_ids=list(request_ids),
            starts_R=np.array([p.start for p in planned], np.int64),
            counts_R=kept_R,
            ids_TLK=ids_TLK,
            weight_version=WEIGHT_VERSION,
            runs_R=np.array([p.run for p in planned], np.int64),
        )
        return StoredStep.of(step)


def _kept_rows(counts_R: Counts, kept_R: Counts) -> Counts:
    """Indices of the first `kept_R` rows of each request among all rows."""
    firsts = (np.cumsum(counts_R) - counts_R).tolist()
    parts = [np.arange(f, f + k) for f, k in zip(firsts, kept_R.tolist(), strict=True)]
    return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class StoredStep:
    """The rows of a step as the ledger got them, and where those of each request are."""

    step: StepRows
    places: Mapping[str, tuple[int, int, int]]
    """By request: position of its first row, offset of that row in the step, number of rows."""

    @classmethod
    def of(cls, step: StepRows) -> StoredStep:
        """Note the places in a step."""
        counts = step.counts_R.tolist()
        offsets = (np.cumsum(step.counts_R) - step.counts_R).tolist()
        places = zip(step.starts_R.tolist(), offsets, counts, strict=True)
        return cls(step, dict(zip(step.request_ids, places, strict=True)))

    def rows_of(self, request_id: str, start: int, stop: int) -> RouteIds | None:
        """Rows `[start, stop)` of a request as a view, or None if the step did not compute all of them."""
        first, offset, count = self.places.get(request_id, (0, 0, 0))
        if not count or start < first or stop > first + count:
            return None
        return self.step.ids_TLK[offset + start - first : offset + stop - first]
