"""The memory of a ledger: rows in chunks of one KV block's tokens, counted by reference.

Legend of shape suffixes: T = rows given or asked, C = chunks, B = block_size, R = requests, N = steps, L = MoE layers,
K = top-k.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from routebook.errors import IntegrityError
from routebook.ledger.base import RouteIds
from routebook.ledger.free_extents import FreeExtents
from routebook.ledger.row_array import RowArray
from routebook.ledger.spans import Index, breaks, spans
from routebook.routes.provenance import ABSENT, Origin
from routebook.routes.schema import RouteSchema

_MISSING = 2**31 - 1
"""A chunk that no pool has."""


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
        self._ids = RowArray(schema, block_size, 0)
        self._origin_CB: npt.NDArray[np.uint8] = np.zeros((0, block_size), np.uint8)
        self._version_CB: npt.NDArray[np.uint32] = np.zeros((0, block_size), np.uint32)
        self._grow(initial_chunks)

    @property
    def num_chunks(self) -> int:
        """Chunks that exist, free ones included."""
        return len(self.refs_C)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, free chunks included."""
        arrays = (self._ids.ids_TLK, self._origin_CB, self._version_CB, self.refs_C)
        return sum(array.nbytes for array in arrays)

    def allocate(self, count: int, after: int = -1) -> Index:
        """Hand out `count` chunks, at least 1, to one owner; see :meth:`allocate_each`."""
        self._have(count)
        chunks = []
        for start, length in self.free.take(count, after + 1 if after >= 0 else None):
            stop = start + length
            self.refs_C[start:stop] = 1
            self._origin_CB[start:stop] = ABSENT
            chunks.append(np.arange(start, stop))
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)

    def allocate_one(self, after: int) -> int:
        """Hand out one chunk; see :meth:`allocate_each`."""
        self._have(1)
        ((chunk, _),) = self.free.take(1, after + 1 if after >= 0 else None)
        self.refs_C[chunk] = 1
        self._origin_CB[chunk] = ABSENT
        return chunk

    def allocate_each(self, counts: Sequence[int], after: Sequence[int]) -> Index:
        """Hand out chunks to several owners, with one reference each and every row absent.

        Args:
            counts: how many chunks each owner wants, at least 1.
            after: for each owner the chunk behind which its own should lie, negative for no wish.

        Returns:
            int64 `[sum(counts)]`, owner by owner. The chunks of an owner lie behind its `after` and behind each
            other as far as those places are free.
        """
        self._have(sum(counts))
        starts, lengths = (np.array(e, np.int64) for e in self.free.take_each(counts, after))
        chunks_C = starts
        if len(starts) < lengths.sum():
            before = np.cumsum(lengths) - lengths
            chunks_C = np.repeat(starts - before, lengths) + np.arange(lengths.sum())
        self.refs_C[chunks_C] = 1
        self._origin_CB[chunks_C] = ABSENT
        return chunks_C

    def retain(self, chunks_C: Index) -> None:
        """Add one reference to each chunk; a chunk given twice gets two."""
        np.add.at(self.refs_C, chunks_C, 1)

    def retain_one(self, chunk: int) -> None:
        """Add one reference to a chunk."""
        self.refs_C[chunk] += 1

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
        present_T: npt.NDArray[np.bool_] = self._origin_CB.reshape(-1)[rows_T] != ABSENT
        return present_T

    def complete(self, chunks_C: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Which of these chunks have no absent row, bool `[C]`."""
        complete_C: npt.NDArray[np.bool_] = np.all(self._origin_CB[chunks_C] != ABSENT, axis=1)
        return complete_C

    def blank(self, chunks_C: npt.NDArray[np.integer]) -> bool:
        """Whether none of these chunks has a row."""
        return not self._origin_CB.take(chunks_C, axis=0).any()

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
        self._ids.put(rows_T, ids_TLK)
        self._tag(rows_T, origin_T, weight_version)

    def write_blocks(
        self,
        chunks_C: npt.NDArray[np.integer],
        ids_TLK: RouteIds,
        source: int,
        origin_CB: npt.NDArray[np.uint8] | int,
        weight_version: int,
    ) -> None:
        """Write whole chunks.

        Args:
            chunks_C: integers `[C]`, no chunk twice.
            ids_TLK: schema's dtype, contiguous.
            source: place in `ids_TLK` of the first row of the first chunk; the others follow it.
            origin_CB: uint8 `[C, block_size]`, or one origin for all.
            weight_version: version of the weights that ran, for all.
        """
        self._ids.put_blocks(chunks_C, ids_TLK, source)
        self._origin_CB[chunks_C] = origin_CB
        self._version_CB[chunks_C] = weight_version

    def write_steps(
        self, rows_RN: Index, steps: Sequence[RouteIds], origin: Origin, weight_version: int
    ) -> None:
        """Write the rows of several steps of one batch; see :meth:`RowArray.put_steps`."""
        self._ids.put_steps(rows_RN, steps)
        self._tag(rows_RN.ravel(), int(origin), weight_version)

    def copy_chunk(self, source: int, target: int) -> None:
        """Copy every row of one chunk onto another."""
        self._ids.copy_block(source, target)
        self._origin_CB[target] = self._origin_CB[source]
        self._version_CB[target] = self._version_CB[source]

    def read(
        self, chunks_C: npt.NDArray[np.integer]
    ) -> tuple[RouteIds, npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """Copy whole chunks: ids `[C * B, L, K]`, origins uint8 `[C * B]`, versions uint32 `[C * B]`.

        A negative chunk reads as absent rows. The ids and version of an absent row mean nothing.
        """
        missing = len(chunks_C) and chunks_C.min() < 0
        ids_TLK = self._ids.take_blocks(chunks_C & _MISSING if missing else chunks_C)
        origin_CB = self._origin_CB.take(chunks_C, axis=0, mode="clip")
        version_CB = self._version_CB.take(chunks_C, axis=0, mode="clip")
        if missing:
            origin_CB[chunks_C < 0] = ABSENT
        return ids_TLK, origin_CB.reshape(-1), version_CB.reshape(-1)

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

    def _tag(
        self, rows_T: Index, origin_T: npt.NDArray[np.uint8] | int, weight_version: int
    ) -> None:
        self._origin_CB.reshape(-1)[rows_T] = origin_T
        self._version_CB.reshape(-1)[rows_T] = weight_version

    def _have(self, count: int) -> None:
        """Have at least so many free chunks."""
        if count > self.free.total:
            self._grow(max(int(self.num_chunks * self._growth_factor), self.num_chunks + count))

    def _grow(self, num_chunks: int) -> None:
        old, more = self.num_chunks, num_chunks - self.num_chunks
        self._ids.grow(num_chunks)
        self._origin_CB = np.pad(self._origin_CB, ((0, more), (0, 0)))
        self._version_CB = np.pad(self._version_CB, ((0, more), (0, 0)))
        self.refs_C = np.pad(self.refs_C, (0, more))
        self.free.add(old, more)
