"""Expert ids of rows in blocks, copied as opaque items: a row, or a whole block, at a time.

numpy moves an item of `V384` in one copy where it would move 384 numbers one by one.

Legend of shape suffixes: T = rows given or asked, C = blocks, R = requests, N = steps, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from routebook.ledger.base import RouteIds
from routebook.ledger.spans import Index, breaks, spans
from routebook.routes.schema import RouteSchema

MIN_BLOCKS_PER_SPAN = 2
"""Adjacent blocks are copied at once when spans are at least this long on average; below, the calls cost more."""
_FEW_ROWS = 512
"""Below, one indexed copy costs less than looking for spans."""
_LARGE_STEP_NBYTES = 1 << 14
"""Below, joining the rows of several steps costs less than one indexed copy for each."""
_STRIDE_NBYTES = 12 << 10
"""Of several steps, so much is written per step before the next one: rows of a request lie side by side, so the
second finds its place in the cache."""


class RowArray:
    """`ids_TLK[num_blocks * block_size, L, K]`: rows by number, `row = block * block_size + offset`.

    Args:
        schema: layers, top-k and dtype of a row.
        block_size: rows per block.
        num_blocks: blocks at the start. Rows are left unwritten: memory is mapped by the system when it is used.
    """

    def __init__(self, schema: RouteSchema, block_size: int, num_blocks: int) -> None:
        self.schema = schema
        self.block_size = block_size
        self._row = np.dtype(f"V{schema.row_nbytes}")
        self._block = np.dtype(f"V{schema.row_nbytes * block_size}")
        self.ids_TLK: RouteIds = np.empty(schema.shape(0), schema.dtype)
        self.grow(num_blocks)

    def grow(self, num_blocks: int) -> None:
        """Have `num_blocks` blocks, at least as many as now; the new rows are unwritten."""
        ids_TLK: RouteIds = np.empty(
            self.schema.shape(num_blocks * self.block_size), self.schema.dtype
        )
        ids_TLK[: len(self.ids_TLK)] = self.ids_TLK
        self.ids_TLK = ids_TLK
        self._bytes = ids_TLK.reshape(-1).view(np.uint8)
        self._rows = self._bytes.view(self._row)
        self._blocks = self._bytes.view(self._block)

    def put(self, rows_T: Index, ids_TLK: RouteIds) -> None:
        """Write each row of `ids_TLK` (schema's dtype, contiguous) to its place.

        Args:
            rows_T: int64 `[T]`, no row twice.
            ids_TLK: `[T, L, K]`.
        """
        size = self.block_size
        if len(rows_T) >= _FEW_ROWS and len(rows_T) % size == 0 and self._are_blocks(rows_T):
            self.put_blocks(rows_T[::size] // size, ids_TLK, 0)
        else:
            self._rows[rows_T] = ids_TLK.reshape(-1).view(self._row)

    def put_blocks(self, blocks_C: npt.NDArray[np.integer], ids_TLK: RouteIds, source: int) -> None:
        """Write whole blocks.

        Args:
            blocks_C: integers `[C]`, no block twice.
            ids_TLK: schema's dtype, contiguous.
            source: place in `ids_TLK` of the first row of the first block; the others follow it.
        """
        nbytes, begin = self._block.itemsize, source * self._row.itemsize
        given = ids_TLK.reshape(-1).view(np.uint8)[begin : begin + len(blocks_C) * nbytes]
        edges = breaks(blocks_C)
        if (len(edges) + 1) * MIN_BLOCKS_PER_SPAN > len(blocks_C):
            self._blocks[blocks_C] = given.view(self._block)
            return
        for a, b in spans(blocks_C, edges):
            at = int(blocks_C[a]) * nbytes
            self._bytes[at : at + (b - a) * nbytes] = given[a * nbytes : b * nbytes]

    def put_steps(self, rows_RN: Index, steps: Sequence[RouteIds]) -> None:
        """Write the rows of several steps of one batch.

        Args:
            rows_RN: int64 `[R, N]`, where the row of each request and step goes, no row twice.
            steps: of each step, `[R, L, K]` in the schema's dtype, contiguous.
        """
        rows_NR = np.ascontiguousarray(rows_RN.T)
        if steps[0].nbytes < _LARGE_STEP_NBYTES:
            self._rows[rows_NR.ravel()] = np.concatenate(steps).reshape(-1).view(self._row)
            return
        given = [ids_RLK.reshape(-1).view(self._row) for ids_RLK in steps]
        some = max(1, _STRIDE_NBYTES // self._row.itemsize)
        for first in range(0, len(rows_RN), some):
            part = slice(first, first + some)
            for rows_R, rows in zip(rows_NR, given, strict=True):
                self._rows[rows_R[part]] = rows[part]

    def copy_block(self, source: int, target: int) -> None:
        """Copy every row of one block onto another."""
        self._blocks[target] = self._blocks[source]

    def take_blocks(self, blocks_C: npt.NDArray[np.integer]) -> RouteIds:
        """Copy whole blocks, `[C * block_size, L, K]`; rows of a block beyond the last one mean nothing.

        Args:
            blocks_C: integers `[C]`, none negative.
        """
        num_rows, taken = len(blocks_C) * self.block_size, np.empty(len(blocks_C), self._block)
        if num_rows < _FEW_ROWS or not self._take_spans(blocks_C, taken.view(np.uint8)):
            # Clipping lets numpy write straight into `taken`.
            self._blocks.take(blocks_C, out=taken, mode="clip")
        return taken.view(self.schema.dtype).reshape(self.schema.shape(num_rows))

    def _take_spans(self, blocks_C: npt.NDArray[np.integer], taken: npt.NDArray[np.uint8]) -> bool:
        """Copy adjacent blocks at once, if there are enough of them to be worth it."""
        edges, nbytes = breaks(blocks_C), self._block.itemsize
        if (len(edges) + 1) * MIN_BLOCKS_PER_SPAN > len(blocks_C):
            return False
        for first, stop in spans(blocks_C, edges):
            begin = int(blocks_C[first]) * nbytes
            source = self._bytes[begin : begin + (stop - first) * nbytes]
            taken[first * nbytes : first * nbytes + len(source)] = source
        return True

    def _are_blocks(self, rows_T: Index) -> bool:
        rows_CB = rows_T.reshape(-1, self.block_size)
        if (rows_CB[:, 0] % self.block_size).any():
            return False
        return bool((rows_CB[:, 1:] == rows_CB[:, :-1] + 1).all())
