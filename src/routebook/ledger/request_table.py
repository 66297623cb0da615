"""The living requests of a ledger. Those that were planned once have a row in arrays that grow.

Requests may wait in great numbers, and rows are as long as the longest request; so a row is taken at first use.

Legend of shape suffixes: N = table rows, R = requests of a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import repeat

import numpy as np

from routebook.errors import IntegrityError, LedgerError
from routebook.ledger.base import StepRows
from routebook.ledger.spans import Index

NOBODY = -1
"""The table row of a request that does not live, and its run."""


class RequestTable(ABC):
    """Names, prompt lengths and runs; what else a row holds is a subclass's affair.

    Growth replaces the arrays: never keep one.

    Args:
        rows: requests that fit at the start, at least 1.
    """

    def __init__(self, rows: int) -> None:
        self.row_of: dict[str, int] = {}
        """Table row of each living request that has one."""
        self.prompt_N: Index = np.zeros(rows, np.int64)
        """Prompt tokens of the request."""
        self.run_N: Index = np.zeros(rows, np.int64)
        """How often the request was preempted: the number of its current run."""
        self._unused = list(range(rows - 1, -1, -1))
        self._queued: dict[str, int] = {}
        """Prompt tokens of each living request without a row."""

    def __len__(self) -> int:
        """Living requests."""
        return len(self.row_of) + len(self._queued)

    @property
    def unused(self) -> tuple[int, ...]:
        """Table rows that belong to no request."""
        return tuple(self._unused)

    def begin(self, request_id: str, num_prompt_tokens: int) -> None:
        """Start a request in run 0.

        Raises:
            LedgerError: it lives already, or `num_prompt_tokens` is negative.
        """
        if request_id in self.row_of or request_id in self._queued:
            raise LedgerError(f"request {request_id!r} lives already; release it first")
        if num_prompt_tokens < 0:
            raise LedgerError(
                f"num_prompt_tokens={num_prompt_tokens} of {request_id!r} is negative"
            )
        self._queued[request_id] = num_prompt_tokens

    def end(self, request_id: str) -> None:
        """Forget a living request and empty its row."""
        row = self.row(request_id)
        del self.row_of[request_id]
        self._empty(row)
        self._unused.append(row)

    def row(self, request_id: str) -> int:
        """The table row of a living request.

        Raises:
            LedgerError: no such request.
        """
        row = self.row_of.get(request_id)
        return self._place(request_id) if row is None else row

    def rows(self, request_ids: Sequence[str]) -> Index:
        """Table row of each request, or `NOBODY`, int64 `[R]`."""
        if self._queued:
            for request_id in self._queued.keys() & set(request_ids):
                self._place(request_id)
        return np.array(list(map(self.row_of.get, request_ids, repeat(NOBODY))), np.int64)

    def runs(self, step: StepRows, row_R: Index) -> Index:
        """Run of each request of a step: as told, else the current one, of which a request that is gone has none.

        Raises:
            LedgerError: the step names a run that has not begun.
        """
        current_R = np.where(row_R >= 0, self.run_N[row_R], NOBODY)
        if step.runs_R is None:
            return current_R
        ahead = np.flatnonzero((row_R >= 0) & (step.runs_R > current_R))
        if len(ahead):
            which = int(ahead[0])
            raise LedgerError(
                f"run {step.runs_R[which]} of {step.request_ids[which]!r} has not begun; it was"
                f" preempted {current_R[which]} times"
            )
        return step.runs_R

    def check(self) -> None:
        """Recount the rows.

        Raises:
            IntegrityError: a row is used twice or lost, or one without a request is not empty.
        """
        rows = [*self.row_of.values(), *self._unused]
        if sorted(rows) != list(range(len(self.run_N))):
            raise IntegrityError(f"table rows {sorted(rows)} are not each used once")
        for row in self._unused:
            if not self._is_empty(row):
                raise IntegrityError(f"table row {row} belongs to no request and holds something")

    def _place(self, request_id: str) -> int:
        if request_id not in self._queued:
            raise LedgerError(f"no living request {request_id!r}; begin it first")
        if not self._unused:
            self._add_rows()
        row = self.row_of[request_id] = self._unused.pop()
        self.prompt_N[row], self.run_N[row] = self._queued.pop(request_id), 0
        return row

    def _add_rows(self) -> None:
        rows = len(self.run_N)
        self._unused.extend(range(2 * rows - 1, rows - 1, -1))
        self.prompt_N, self.run_N = (np.pad(c, (0, rows)) for c in (self.prompt_N, self.run_N))
        self._pad_rows(rows)

    @abstractmethod
    def _pad_rows(self, rows: int) -> None:
        """Add that many empty rows."""

    @abstractmethod
    def _empty(self, row: int) -> None:
        """Empty a row."""

    @abstractmethod
    def _is_empty(self, row: int) -> bool:
        """Whether a row holds nothing."""
