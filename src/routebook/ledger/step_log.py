"""Decode steps that are taken over as they come and written together.

Most steps are one row for each request of a batch that has not changed, each behind the last. Such a step is kept as
the array that the worker made, and several are written at once, each request's rows side by side. This is no new
order of events: a step may always be stored after the plans of later ones (see `base.py`). What must not be late are
answers and refusals. So a ledger writes the log out before it reads, counts or releases, and a step is only appended
if nothing about it can be refused.

Legend of shape suffixes: R = requests of the batch, N = steps, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from routebook.ledger.base import RouteIds, StepRows
from routebook.ledger.spans import Index
from routebook.routes.schema import RouteSchema

_INT64 = np.dtype(np.int64)
_MAX_STEPS = 256
_MAX_ROWS = 8192
_MAX_NBYTES = 4 << 20
"""Written at the latest when one of these is reached: beyond, more steps cost no less each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedSteps:
    """N consecutive steps of one batch, one row of each request in each."""

    request_ids: list[str]
    row_R: Index
    """Table row of each request."""
    run_R: Index
    starts_R: Index
    """Position of the first row of each request."""
    counts_R: Index
    """N for each request."""
    steps: list[RouteIds]
    """Of each step, `[R, L, K]`."""
    weight_version: int

    def merged(self) -> StepRows:
        """The same as one step of N rows for each request."""
        ids_RNLK = np.stack(self.steps, axis=1)
        return StepRows(
            request_ids=self.request_ids,
            starts_R=self.starts_R,
            counts_R=self.counts_R,
            ids_TLK=ids_RNLK.reshape(-1, *ids_RNLK.shape[2:]),
            weight_version=self.weight_version,
            runs_R=self.run_R,
        )


class StepLog:
    """The batch whose steps are taken over, and those that are not written yet.

    Args:
        schema: layers, top-k and dtype of a row.
    """

    def __init__(self, schema: RouteSchema) -> None:
        self._dtype = schema.dtype
        self._row_shape = schema.shape(1)[1:]
        self._request_ids: list[str] | None = None
        self._steps: list[RouteIds] = []
        self._version = 0

    def open(self, step: StepRows, row_R: Index, run_R: Index) -> None:
        """Begin with a checked step of one row each.

        Args:
            step: of requests that all live, in their current runs; nothing about it may be refused.
            row_R: their table rows, int64 `[R]`.
            run_R: their current runs, int64 `[R]`.
        """
        assert not self._steps, "steps of another batch are not written yet"
        num_requests = len(step.request_ids)
        self._request_ids = list(step.request_ids)
        self._shape, self._columns = (num_requests, *self._row_shape), (num_requests,)
        self._version = step.weight_version
        self._ones_R = np.ones(num_requests, np.int64)
        self._ones = self._ones_R.tobytes()
        self.row_R, self._run_R = row_R, run_R.copy()
        self._runs = run_R.tobytes()
        self.next_R = step.starts_R.copy()
        """Position of the next row of each request."""
        most = min(_MAX_ROWS // num_requests, _MAX_NBYTES // step.ids_TLK.nbytes, _MAX_STEPS)
        self._limit = max(most, 1)
        self.append(step.ids_TLK)

    def close(self) -> None:
        """The batch has changed; its steps were taken before."""
        assert not self._steps, "steps of the batch are not written yet"
        self._request_ids = None

    def continues(self, step: StepRows) -> bool:
        """Whether this is one more step of the open batch, so that `StepRows.check` must find it right.

        Written to touch little, since the caches are often empty after a forward pass: bytes are compared rather
        than arrays, and types by identity. A twin of the type may be told that it does not continue: that costs
        time and nothing else.
        """
        request_ids, ids, starts_R, counts_R = (
            step.request_ids,
            step.ids_TLK,
            step.starts_R,
            step.counts_R,
        )
        if type(request_ids) is not list:
            request_ids = list(request_ids)
        return (
            request_ids == self._request_ids
            and step.weight_version == self._version
            and ids.shape == self._shape
            and ids.dtype is self._dtype
            and starts_R.dtype is counts_R.dtype is _INT64
            and starts_R.shape == counts_R.shape == self._columns
            and starts_R.tobytes() == self.next_R.tobytes()
            and counts_R.tobytes() == self._ones
            and ids.flags.c_contiguous
            and (step.runs_R is None or self._are_runs(step.runs_R))
        )

    def append(self, ids_RLK: RouteIds) -> bool:
        """Take over the rows of a step that continues the batch; True if the log should be written now."""
        self._steps.append(ids_RLK)
        self.next_R += self._ones_R
        return len(self._steps) >= self._limit

    def take(self) -> LoggedSteps | None:
        """Hand over what is not written yet, or None. The batch stays open."""
        if self._request_ids is None or not self._steps:
            return None
        steps, self._steps = self._steps, []
        return LoggedSteps(
            request_ids=self._request_ids,
            row_R=self.row_R,
            run_R=self._run_R,
            starts_R=self.next_R - len(steps),
            counts_R=np.full(len(self.next_R), len(steps), np.int64),
            steps=steps,
            weight_version=self._version,
        )

    def _are_runs(self, runs_R: Index) -> bool:
        if runs_R.dtype is not _INT64 or runs_R.shape != self._columns:
            return False
        return runs_R.tobytes() == self._runs
