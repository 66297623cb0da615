"""Which chunks the living requests hold, as arrays over `[request row, block]` that grow in both directions.

Legend of shape suffixes: N = table rows (one per living request), M = blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NONE = -1
"""No chunk here."""
DECLINED = -2
"""In `redo`: the rows of the recomputation are not wanted, since the block's hash is published already."""
MIXED = -2
"""In `home`: the chunk holds rows of several runs, so it can never be published."""

Table = npt.NDArray[np.int32]
Column = npt.NDArray[np.int64]

_FIELDS = 5


class ChunkTable:
    """One row per living request. The attributes are views that growth replaces: never keep one."""

    own_NM: Table
    """The request's own chunk of each block: only the request itself writes to it."""
    home_NM: Table
    """The run whose rows, and no others, the own chunk holds, or `MIXED`."""
    shared_NM: Table
    """The chunk taken from the prefix cache: never written through this table."""
    shared_run_NM: Table
    """The run in which it was taken."""
    redo_NM: Table
    """The rows that the current run computes for a block whose own or shared rows are older, or `DECLINED`."""

    def __init__(self, rows: int = 16, blocks: int = 64) -> None:
        self._data = np.full((_FIELDS, rows, blocks), NONE, np.int32)
        self.prompt_N: Column = np.zeros(rows, np.int64)
        """Prompt tokens of the request."""
        self.run_N: Column = np.zeros(rows, np.int64)
        """How often the request was preempted: the number of its current run."""
        self.hit_blocks_N: Column = np.zeros(rows, np.int64)
        """Leading blocks that the current run took from the prefix cache."""
        self.next_N: Column = np.full(rows, NONE, np.int64)
        """Position whose row would continue the request's last one in the same own chunk, or `NONE`."""
        self.next_row_N: Column = np.zeros(rows, np.int64)
        """Row of the pool that this position would take."""
        self._unused = list(range(rows - 1, -1, -1))
        self._bind()

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
        self.run_N[row] = self.hit_blocks_N[row] = 0
        self.next_N[row] = NONE
        return row

    def remove(self, row: int) -> None:
        """Empty a row and give it back; the chunks are the caller's affair."""
        self._data[:, row] = NONE
        self._unused.append(row)

    def reach(self, num_blocks: int) -> None:
        """Have at least `num_blocks` blocks per row."""
        more = num_blocks - self._data.shape[2]
        if more > 0:
            more = max(more, self._data.shape[2])
            self._data = np.pad(self._data, ((0, 0), (0, 0), (0, more)), constant_values=NONE)
            self._bind()

    def _add_rows(self) -> None:
        rows = self._data.shape[1]
        self._data = np.pad(self._data, ((0, 0), (0, rows), (0, 0)), constant_values=NONE)
        columns = (self.prompt_N, self.run_N, self.hit_blocks_N, self.next_N, self.next_row_N)
        self.prompt_N, self.run_N, self.hit_blocks_N, self.next_N, self.next_row_N = (
            np.pad(column, (0, rows)) for column in columns
        )
        self._unused.extend(range(2 * rows - 1, rows - 1, -1))
        self._bind()

    def _bind(self) -> None:
        self.own_NM, self.home_NM, self.shared_NM, self.shared_run_NM, self.redo_NM = self._data
