"""The block tables of the living requests, as leases, in arrays over `[request row, block]` that grow.

Legend of shape suffixes: N = table rows, M = blocks.
"""

from __future__ import annotations

import numpy as np

from routebook.ledger.request_table import RequestTable
from routebook.ledger.slot_rows import NO_LEASE
from routebook.ledger.spans import Index


class BlockTables(RequestTable):
    """The blocks of each request. The attributes are replaced by growth: never keep one.

    Args:
        rows: requests that fit at the start, at least 1.
        blocks: blocks per request that fit at the start, at least 1.
    """

    def __init__(self, rows: int, blocks: int = 64) -> None:
        super().__init__(rows)
        self.lease_NM: Index = np.full((rows, blocks), NO_LEASE, np.int64)
        """Block of the current run, as the lease under which its rows are read and, behind the hits, written."""
        self.hits_N: Index = np.zeros(rows, np.int64)
        """Leading blocks that the current run took from the prefix cache."""
        self.assigned_N: Index = np.zeros(rows, np.int64)
        """Blocks that were assigned to the current run, the hits included."""

    def start_run(self, row: int) -> None:
        """The request was preempted: its next run has no blocks yet."""
        self.run_N[row] += 1
        self._drop_blocks(row)

    def reach(self, num_blocks: int) -> None:
        """Have at least `num_blocks` blocks per row."""
        more = num_blocks - self.lease_NM.shape[1]
        if more > 0:
            self._pad(0, max(more, self.lease_NM.shape[1]))

    def _drop_blocks(self, row: int) -> None:
        self.lease_NM[row] = NO_LEASE
        self.hits_N[row] = self.assigned_N[row] = 0

    def _pad_rows(self, rows: int) -> None:
        self.hits_N, self.assigned_N = (
            np.pad(c, (0, rows)) for c in (self.hits_N, self.assigned_N)
        )
        self._pad(rows, 0)

    def _empty(self, row: int) -> None:
        self._drop_blocks(row)

    def _is_empty(self, row: int) -> bool:
        return bool((self.lease_NM[row] == NO_LEASE).all())

    def _pad(self, rows: int, blocks: int) -> None:
        more = ((0, rows), (0, blocks))
        self.lease_NM = np.pad(self.lease_NM, more, constant_values=NO_LEASE)
