"""The block tables of the living requests, as leases, in arrays over `[request row, block]` that grow.

Legend of shape suffixes: N = table rows (one per living request), M = blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from routebook.ledger.slot_rows import NO_LEASE
from routebook.ledger.spans import Index

Column = npt.NDArray[np.int64]


class BlockTables:
    """One row per living request. The attributes are replaced by growth: never keep one.

    Args:
        rows: requests that fit at the start, at least 1.
        blocks: blocks per request that fit at the start, at least 1.
    """

    def __init__(self, rows: int, blocks: int = 64) -> None:
        self.lease_NM: Index = np.full((rows, blocks), NO_LEASE, np.int64)
        """Block of the current run, as the lease under which its rows are read and, behind the hits, written."""
        self.borrowed_NM: npt.NDArray[np.bool_] = np.zeros((rows, blocks), np.bool_)
        """Blocks that this run or an earlier one took from the prefix cache, with rows."""
        self.prompt_N: Column = np.zeros(rows, np.int64)
        """Prompt tokens of the request."""
        self.run_N: Column = np.zeros(rows, np.int64)
        """How often the request was preempted: the number of its current run."""
        self.hits_N: Column = np.zeros(rows, np.int64)
        """Leading blocks that the current run took from the prefix cache."""
        self.assigned_N: Column = np.zeros(rows, np.int64)
        """Blocks that were assigned to the current run, the hits included."""
        self._unused = list(range(rows - 1, -1, -1))

    @property
    def unused(self) -> tuple[int, ...]:
        """Table rows that belong to no request."""
        return tuple(self._unused)

    def add(self, num_prompt_tokens: int) -> int:
        """Take an empty row for a new request and return its number."""
        if not self._unused:
            self._add_rows()
        row = self._unused.pop()
        self.prompt_N[row] = num_prompt_tokens
        self.run_N[row] = 0
        return row

    def start_run(self, row: int) -> None:
        """The request was preempted: its next run has no blocks yet."""
        self.run_N[row] += 1
        self._empty(row)

    def remove(self, row: int) -> None:
        """Empty a row and give it back."""
        self._empty(row)
        self.borrowed_NM[row] = False
        self._unused.append(row)

    def reach(self, num_blocks: int) -> None:
        """Have at least `num_blocks` blocks per row."""
        more = num_blocks - self.lease_NM.shape[1]
        if more > 0:
            self._pad(0, max(more, self.lease_NM.shape[1]))

    def _empty(self, row: int) -> None:
        self.lease_NM[row] = NO_LEASE
        self.hits_N[row] = self.assigned_N[row] = 0

    def _add_rows(self) -> None:
        rows = len(self.run_N)
        columns = (self.prompt_N, self.run_N, self.hits_N, self.assigned_N)
        self.prompt_N, self.run_N, self.hits_N, self.assigned_N = (
            np.pad(column, (0, rows)) for column in columns
        )
        self._pad(rows, 0)
        self._unused.extend(range(2 * rows - 1, rows - 1, -1))

    def _pad(self, rows: int, blocks: int) -> None:
        more = ((0, rows), (0, blocks))
        self.lease_NM = np.pad(self.lease_NM, more, constant_values=NO_LEASE)
        self.borrowed_NM = np.pad(self.borrowed_NM, more)
