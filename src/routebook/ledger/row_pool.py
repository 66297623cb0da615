"""The memory of a ledger: rows in chunks of one KV block's tokens, counted by reference.

Legend of shape suffixes: T = rows given or asked, C = chunks, B = block_size, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from routebook.errors import IntegrityError
from routebook.ledger.base import RouteIds
from routebook.ledger.free_extents import FreeExtents
from routebook.ledger.spans import MIN_ROWS_PER_SPAN, Index, breaks, spans
from routebook.routes.provenance import Origin
from routebook.routes.schema import RouteSchema


class RowPool:
    """Rows with their origin and weight version, in reference-counted chunks of `block_size` rows.

    Chunk `c` holds rows `[c * block_size, (c + 1) * block_size)`. The pool grows and never shrinks; arrays taken
    from it before it grew are stale, so nobody keeps them.

    Args:
        schema: layers, top-k and dtype of a row.
        block_size: rows per chunk.
        initial_chunks: chunks at the start, at least 1.
        growth_factor: capacity after growth over capacity before, above 1.
    """

    def __init__(
        self, schema: RouteSchema, block_size: int, *, initial_chunks: int, growth_factor: float
    ) -> None:
        self.schema = schema
        self.block_size = block_size
        self.free = FreeExtents()
        self.refs_C: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._growth_factor = growth_factor
        self._ids: RouteIds = np.empty((0, schema.num_layers * schema.top_k), schema.dtype)
        self._origin: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._version: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._grow(initial_chunks)

    @property
    def num_chunks(self) -> int:
        """Chunks that exist, free ones included."""
        return len(self.refs_C)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, free chunks included."""
        arrays = (self._ids, self._origin, self._version, self.refs_C)
        return sum(array.nbytes for array in arrays)

    def allocate(self, count: int, after: int = -1) -> Index:
        """Hand out `count` chunks; see :meth:`allocate_each`."""
        return self.allocate_each([count], [after])

    def allocate_each(self, counts: Sequence[int], after: Sequence[int]) -> Index:
        """Hand out chunks to several owners, with one reference each and every row absent.

        Args:
            counts: how many chunks each owner wants, at least 1.
            after: for each owner the chunk behind which its own should lie, negative for no wish.

        Returns:
            int64 `[sum(counts)]`, owner by owner. The chunks of an owner lie behind its `after` and behind each
            other as far as those places are free.
        """
        total = sum(counts)
        if total > self.free.total:
            self._grow(max(int(self.num_chunks * self._growth_factor), self.num_chunks + total))
        chunks: list[int] = []
        for count, behind in zip(counts, after, strict=True):
            for start, length in self.free.take(count, behind + 1 if behind >= 0 else None):
                chunks.extend(range(start, start + length))
        chunks_C = np.array(chunks, np.int64)
        self.refs_C[chunks_C] = 1
        self._origin.reshape(-1, self.block_size)[chunks_C] = Origin.ABSENT
        return chunks_C

    def retain(self, chunks_C: Index) -> None:
        """Add one reference to each chunk; a chunk given twice gets two."""
        np.add.at(self.refs_C, chunks_C, 1)

    def release(self, chunks_C: Index) -> Index:
        """Drop one reference of each chunk and return the chunks that became free, int64, ascending."""
        np.subtract.at(self.refs_C, chunks_C, 1)
        assert not (self.refs_C[chunks_C] < 0).any(), "a chunk was released more often than held"
        freed = np.unique(chunks_C[self.refs_C[chunks_C] == 0])
        for first, stop in spans(freed, breaks(freed)):
            self.free.add(int(freed[first]), stop - first)
        return freed

    def present(self, rows_T: Index) -> npt.NDArray[np.bool_]:
        """Which of these rows hold something, bool `[T]`."""
        present_T: npt.NDArray[np.bool_] = self._origin[rows_T] != Origin.ABSENT
        return present_T

    def complete(self, chunks_C: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Which of these chunks have no absent row, bool `[C]`."""
        origin_CB = self._origin.reshape(-1, self.block_size)[chunks_C]
        complete_C: npt.NDArray[np.bool_] = np.all(origin_CB != Origin.ABSENT, axis=1)
        return complete_C

    def write(
        self,
        rows_T: Index,
        ids_TLK: RouteIds,
        origin_T: npt.NDArray[np.uint8] | int,
        weight_version: int,
    ) -> None:
        """Write all rows of `ids_TLK` (schema's dtype, contiguous) to the rows `rows_T` of the pool.

        Args:
            rows_T: int64 `[T]`, no row twice.
            ids_TLK: `[T, L, K]`.
            origin_T: uint8 `[T]`, or one origin for all.
            weight_version: version of the weights that ran, for all.
        """
        edges = breaks(rows_T)
        if (len(edges) + 1) * MIN_ROWS_PER_SPAN > len(rows_T):
            self.scatter(rows_T, ids_TLK, origin_T, weight_version)
            return
        target, source = self._row_views(ids_TLK)
        for first, stop in spans(rows_T, edges):
            rows = slice(int(rows_T[first]), int(rows_T[first]) + stop - first)
            target[rows] = source[first:stop]
            self._origin[rows] = origin_T if isinstance(origin_T, int) else origin_T[first:stop]
            self._version[rows] = weight_version

    def scatter(
        self,
        rows_T: Index,
        ids_TLK: RouteIds,
        origin_T: npt.NDArray[np.uint8] | int,
        weight_version: int,
    ) -> None:
        """As :meth:`write`, for rows that are known to lie apart."""
        target, source = self._row_views(ids_TLK)
        target[rows_T] = source
        self._origin[rows_T] = origin_T
        self._version[rows_T] = weight_version

    def _row_views(self, ids_TLK: RouteIds) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
        """The pool's rows and the given ones, each row one opaque item, so that it is copied as a whole."""
        row = f"V{self.schema.row_nbytes}"
        return self._ids.view(row), ids_TLK.reshape(len(ids_TLK), -1).view(row)

    def copy_chunk(self, source: int, target: int) -> None:
        """Copy every row of one chunk onto another."""
        size = self.block_size
        from_rows = slice(source * size, (source + 1) * size)
        to_rows = slice(target * size, (target + 1) * size)
        for array in (self._ids, self._origin, self._version):
            array[to_rows] = array[from_rows]

    def read(
        self, chunks_C: Index
    ) -> tuple[RouteIds, npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """Copy whole chunks: ids `[C * B, L, K]`, origins uint8 `[C * B]`, versions uint32 `[C * B]`.

        A negative chunk reads as absent rows. The ids and version of an absent row mean nothing.
        """
        size, count = self.block_size, len(chunks_C)
        ids: RouteIds = np.empty((count * size, self._ids.shape[1]), self.schema.dtype)
        # A missing chunk must not look like the one before chunk 0.
        edges = breaks(np.where(chunks_C < 0, -2, chunks_C))
        if not count or (len(edges) + 1) * MIN_ROWS_PER_SPAN <= count * size:
            for first, stop in spans(chunks_C, edges):
                begin = int(chunks_C[first])
                if begin >= 0:
                    rows = slice(begin * size, (begin + stop - first) * size)
                    ids[first * size : stop * size] = self._ids[rows]
        else:
            self._take_chunks(chunks_C, ids)
        origin_CB = self._origin.reshape(-1, size)[chunks_C]
        origin_CB[chunks_C < 0] = Origin.ABSENT
        version_CB = self._version.reshape(-1, size)[chunks_C]
        return ids.reshape(self.schema.shape(count * size)), origin_CB.ravel(), version_CB.ravel()

    def check(self, expected_refs_C: npt.NDArray[np.int64]) -> None:
        """Compare the reference counts with a recount by the owner, and the free list with both.

        Raises:
            IntegrityError: a count differs, or a chunk is free and held, or neither.
        """
        wrong = np.flatnonzero(self.refs_C != expected_refs_C)
        if len(wrong):
            chunk = int(wrong[0])
            held, counted = int(expected_refs_C[chunk]), int(self.refs_C[chunk])
            raise IntegrityError(f"chunk {chunk} has {held} owners and a count of {counted}")
        free = np.zeros(self.num_chunks, np.bool_)
        free[self.free.check(self.num_chunks)] = True
        wrong = np.flatnonzero(free != (self.refs_C == 0))
        if len(wrong):
            chunk = int(wrong[0])
            where = "is free and held" if free[chunk] else "is neither free nor held"
            raise IntegrityError(f"chunk {chunk} {where}")

    def _take_chunks(self, chunks_C: Index, ids: RouteIds) -> None:
        block = f"V{self.schema.row_nbytes * self.block_size}"
        source = self._ids.reshape(self.num_chunks, -1).view(block).ravel()
        # Clipping reads chunk 0 in place of a missing one; its rows are marked absent by the caller. It also
        # lets numpy write straight into `ids`.
        target = ids.reshape(len(chunks_C), -1).view(block).ravel()
        source.take(chunks_C, out=target, mode="clip")

    def _grow(self, num_chunks: int) -> None:
        old = self.num_chunks
        rows, old_rows = num_chunks * self.block_size, old * self.block_size
        # Only the old part is copied: what the system has not been asked to fill stays unmapped until used.
        ids: RouteIds = np.empty((rows, self._ids.shape[1]), self.schema.dtype)
        ids[:old_rows] = self._ids
        self._ids = ids
        self._origin = np.concatenate([self._origin, np.zeros(rows - old_rows, np.uint8)])
        self._version = np.concatenate([self._version, np.zeros(rows - old_rows, np.uint32)])
        self.refs_C = np.concatenate([self.refs_C, np.zeros(num_chunks - old, np.int32)])
        self.free.add(old, num_chunks - old)
