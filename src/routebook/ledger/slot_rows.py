"""Rows by KV slot: `slot = block_id * block_size + offset`, with tags that prove what is read.

A KV block passes from owner to owner, and nothing empties its slots in between. So a block is *leased*: each time
the KV pool hands it out it gets a new lease, a number that never comes again and names block and generation::

    lease = generation << 32 | block_id

One run of one request writes under a lease; others may read under it (the prefix cache). A row is written only
while its lease is the block's present one, and every slot is tagged with the lease under which it was written, so

    a late row of an earlier owner     its lease has ended: it is not written
    a slot of another owner by now     its tag is another lease: it reads as absent
    a slot never written               its tag is no lease: it reads as absent

A slot that still has the tag of an ended lease still has that owner's row, and answers with it.

Legend of shape suffixes: T = rows, M = blocks of a request, B = block_size, N = blocks of the pool, L = MoE layers,
K = top-k.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from routebook.errors import IntegrityError
from routebook.ledger.base import RouteIds
from routebook.ledger.spans import MIN_ROWS_PER_SPAN, Index, breaks, spans
from routebook.routes.provenance import Origin
from routebook.routes.schema import RouteSchema

_Tag = TypeVar("_Tag", bound=np.generic)

NO_LEASE = -1
_FEW_ROWS = 512
"""Below, one indexed copy costs less than looking for spans."""
_BLOCK_BITS = 32
_BLOCK_MASK = (1 << _BLOCK_BITS) - 1


_Leases = TypeVar("_Leases", int, Index)


def block_of(leases: _Leases) -> _Leases:
    """The block of each lease; meaningless for `NO_LEASE`."""
    return leases & _BLOCK_MASK


class RoutedExpertsManager:
    """`routed_experts_by_slot[num_blocks * block_size, L, K]`, aligned with the KV block pool.

    Args:
        schema: layers, top-k and dtype of a row.
        block_size: slots per block.
        num_blocks: blocks of the KV pool, all KV groups included.
    """

    def __init__(self, schema: RouteSchema, block_size: int, num_blocks: int) -> None:
        self.schema = schema
        self.block_size = block_size
        self.num_blocks = num_blocks
        num_slots = num_blocks * block_size
        # Left unwritten: a slot is mapped by the system when it is used.
        self.routed_experts_by_slot: RouteIds = np.empty(schema.shape(num_slots), schema.dtype)
        self.lease_N: Index = np.arange(num_blocks, dtype=np.int64)
        """The present lease of each block."""
        self._lease = np.full(num_slots, NO_LEASE, np.int64)
        self._position = np.zeros(num_slots, np.int32)
        self._version = np.zeros(num_slots, np.uint32)
        self._origin = np.zeros(num_slots, np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of rows and tags, of all slots."""
        tags = (self.lease_N, self._lease, self._position, self._version, self._origin)
        return self.routed_experts_by_slot.nbytes + sum(tag.nbytes for tag in tags)

    def hand_out(self, blocks_M: Index) -> Index:
        """Give blocks, each once, to a new owner: end their leases and return new ones, int64 `[M]`."""
        self.lease_N[blocks_M] += 1 << _BLOCK_BITS
        leases_M: Index = self.lease_N[blocks_M]
        return leases_M

    def holds(self, leases_M: Index) -> npt.NDArray[np.bool_]:
        """Which leases are the present ones of their blocks, bool `[M]`; `NO_LEASE` never is."""
        present_M: npt.NDArray[np.bool_] = self._present(leases_M) == leases_M
        return present_M

    def complete(self, leases_M: Index) -> npt.NDArray[np.bool_]:
        """Under which leases every slot of the block has been written, bool `[M]`."""
        tags_MB = self._taken(self._lease, block_of(leases_M))
        complete_M: npt.NDArray[np.bool_] = np.all(tags_MB == leases_M[:, None], axis=1)
        complete_M[leases_M == NO_LEASE] = False
        return complete_M

    def store_batch(
        self,
        slots_T: Index,
        leases_T: Index,
        positions_T: Index,
        ids_TLK: RouteIds,
        *,
        origin_T: npt.NDArray[np.uint8] | int,
        weight_version: int,
    ) -> None:
        """Write each row to its slot if the lease has not ended; a row that is there under this lease stays.

        Args:
            slots_T: int64 `[T]`, no slot twice.
            leases_T: int64 `[T]`, under which the rows were computed.
            positions_T: int64 `[T]`, of the rows in their request.
            ids_TLK: `[T, L, K]` in the schema's dtype, contiguous.
            origin_T: uint8 `[T]`, or one origin for all.
            weight_version: version of the weights that ran, for all.
        """
        open_T = self._present(leases_T) == leases_T
        open_T &= self._lease[slots_T] != leases_T
        rows_T = ids_TLK.reshape(-1).view(f"V{self.schema.row_nbytes}")
        if not open_T.all():
            slots_T, leases_T, positions_T = slots_T[open_T], leases_T[open_T], positions_T[open_T]
            rows_T = rows_T[open_T]
            if not isinstance(origin_T, int):
                origin_T = origin_T[open_T]
        self._lease[slots_T] = leases_T
        self._position[slots_T] = positions_T
        self._version[slots_T] = weight_version
        self._origin[slots_T] = origin_T
        self._put(slots_T, rows_T)

    def get(
        self, leases_M: Index, first_block: int
    ) -> tuple[RouteIds, npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """Copy whole blocks: ids `[M * B, L, K]`, origins uint8 `[M * B]`, versions uint32 `[M * B]`.

        Args:
            leases_M: under which the rows must have been written; `NO_LEASE` reads as absent rows.
            first_block: place of the first block in its request, so that its rows have the positions
                `first_block * B, ...`. A row of another position is absent.

        The ids and version of an absent row mean nothing.
        """
        size, count = self.block_size, len(leases_M)
        blocks_M = block_of(leases_M)
        proven_MB = self._taken(self._lease, blocks_M) == leases_M[:, None]
        first = first_block * size
        positions_MB = np.arange(first, first + count * size).reshape(count, size)
        proven_MB &= self._taken(self._position, blocks_M) == positions_MB
        # Only a slot that was never written has the tag NO_LEASE, and its origin is ABSENT.
        origin_MB = self._taken(self._origin, blocks_M)
        origin_MB[~proven_MB] = Origin.ABSENT
        version_MB = self._taken(self._version, blocks_M)
        return self._ids_of(blocks_M), origin_MB.ravel(), version_MB.ravel()

    def check(self) -> None:
        """Compare the tags with what can be true of them.

        Raises:
            IntegrityError: a slot has a tag that no write leaves.
        """
        slots = np.flatnonzero(self._lease != NO_LEASE)
        leases, size = self._lease[slots], self.block_size
        right = block_of(leases) == slots // size
        right &= leases <= self.lease_N[slots // size]
        right &= self._position[slots] % size == slots % size
        right &= self._origin[slots] != Origin.ABSENT
        if not right.all():
            slot = int(slots[~right][0])
            raise IntegrityError(
                f"slot {slot} is tagged lease {self._lease[slot]:#x}, position"
                f" {self._position[slot]}, origin {self._origin[slot]}: no write leaves that there"
            )

    def _present(self, leases: Index) -> Index:
        # A block that does not exist is clipped to one whose lease is another.
        present: Index = self.lease_N.take(block_of(leases), mode="clip")
        return present

    def _taken(self, tags: npt.NDArray[_Tag], blocks_M: Index) -> npt.NDArray[_Tag]:
        by_block: npt.NDArray[_Tag] = tags.reshape(self.num_blocks, self.block_size)
        return by_block.take(blocks_M, axis=0, mode="clip")

    def _put(self, slots_T: Index, rows_T: npt.NDArray[np.void]) -> None:
        """Copy rows, each as one opaque item; long spans as slices, and whole blocks as larger items."""
        target = self._ids_as(rows_T.dtype.itemsize)
        if len(slots_T) < _FEW_ROWS:
            target[slots_T] = rows_T
            return
        edges, size = breaks(slots_T), self.block_size
        if (len(edges) + 1) * MIN_ROWS_PER_SPAN <= len(slots_T):
            for first, stop in spans(slots_T, edges):
                slot = int(slots_T[first])
                target[slot : slot + stop - first] = rows_T[first:stop]
            return
        whole = len(slots_T) // size * size
        if (edges[edges < whole] % size).any() or (slots_T[:whole:size] % size).any():
            whole = 0
        blocks = rows_T[:whole].view(f"V{rows_T.dtype.itemsize * size}")
        self._ids_as(blocks.dtype.itemsize)[slots_T[:whole:size] // size] = blocks
        target[slots_T[whole:]] = rows_T[whole:]

    def _ids_as(self, item_nbytes: int) -> npt.NDArray[np.void]:
        """The rows as opaque items of one or more rows each."""
        ids = self.routed_experts_by_slot.reshape(-1)
        return ids.view(np.uint8).view(f"V{item_nbytes}")

    def _ids_of(self, blocks_M: Index) -> RouteIds:
        size, count = self.block_size, len(blocks_M)
        ids: RouteIds = np.empty(self.schema.shape(count * size), self.schema.dtype)
        edges = breaks(blocks_M)
        if not count or (len(edges) + 1) * MIN_ROWS_PER_SPAN <= count * size:
            for first, stop in spans(blocks_M, edges):
                # What lies outside the pool has no rows, and its ids are never looked at.
                slot = min(int(blocks_M[first]), self.num_blocks) * size
                rows = self.routed_experts_by_slot[slot : slot + (stop - first) * size]
                ids[first * size : first * size + len(rows)] = rows
            return ids
        source = self._ids_as(self.schema.row_nbytes * size)
        # Clipping also lets numpy write straight into `ids`.
        source.take(blocks_M, out=ids.reshape(-1).view(source.dtype), mode="clip")
        return ids
