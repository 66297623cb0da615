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

Legend of shape suffixes: T = rows, S = slots, M = blocks of a request, C = blocks to write, B = block_size,
P = blocks of the pool, R = requests, N = steps, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from routebook.errors import IntegrityError
from routebook.ledger.base import RouteIds
from routebook.ledger.row_array import RowArray
from routebook.ledger.spans import Index
from routebook.routes.provenance import ABSENT, Origin
from routebook.routes.schema import RouteSchema

NO_LEASE = -1
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
        self._ids = RowArray(schema, block_size, num_blocks)
        self.lease_P: Index = np.arange(num_blocks, dtype=np.int64)
        """The present lease of each block."""
        tags = num_blocks, block_size
        self._lease_PB: Index = np.full(tags, NO_LEASE, np.int64)
        self._position_PB: npt.NDArray[np.int32] = np.zeros(tags, np.int32)
        self._version_PB: npt.NDArray[np.uint32] = np.zeros(tags, np.uint32)
        self._origin_PB: npt.NDArray[np.uint8] = np.zeros(tags, np.uint8)

    @property
    def routed_experts_by_slot(self) -> RouteIds:
        """The rows, `[num_blocks * block_size, L, K]`."""
        return self._ids.ids_TLK

    @property
    def nbytes(self) -> int:
        """Bytes of rows and tags, of all slots."""
        tags = (
            self.lease_P,
            self._lease_PB,
            self._position_PB,
            self._version_PB,
            self._origin_PB,
        )
        return self.routed_experts_by_slot.nbytes + sum(tag.nbytes for tag in tags)

    def hand_out(self, blocks_M: Index) -> Index:
        """Give blocks, each once, to a new owner: end their leases and return new ones, int64 `[M]`."""
        self.lease_P[blocks_M] += 1 << _BLOCK_BITS
        leases_M: Index = self.lease_P[blocks_M]
        return leases_M

    def holds(self, leases_M: Index) -> npt.NDArray[np.bool_]:
        """Which leases are the present ones of their blocks, bool `[M]`; `NO_LEASE` never is."""
        present_M: npt.NDArray[np.bool_] = self._present(leases_M) == leases_M
        return present_M

    def complete(self, leases_M: Index) -> npt.NDArray[np.bool_]:
        """Under which leases every slot of the block has been written, bool `[M]`."""
        tags_MB = self._lease_PB.take(block_of(leases_M), axis=0, mode="clip")
        complete_M: npt.NDArray[np.bool_] = np.all(tags_MB == leases_M[:, None], axis=1)
        complete_M[leases_M == NO_LEASE] = False
        return complete_M

    def blank(self, leases_M: Index) -> bool:
        """Whether these leases are present ones under which no slot has been written."""
        tags_MB = self._lease_PB.take(block_of(leases_M), axis=0, mode="clip")
        return bool(self.holds(leases_M).all()) and not (tags_MB == leases_M[:, None]).any()

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
        open_T = self._open(slots_T, leases_T)
        if not open_T.all():
            slots_T, leases_T, positions_T = slots_T[open_T], leases_T[open_T], positions_T[open_T]
            ids_TLK = ids_TLK[open_T]
            if not isinstance(origin_T, int):
                origin_T = origin_T[open_T]
        self._tag(slots_T, leases_T, positions_T, origin_T, weight_version)
        self._ids.put(slots_T, ids_TLK)

    def store_blocks(
        self,
        leases_C: Index,
        first_block: int,
        ids_TLK: RouteIds,
        source: int,
        *,
        origin_CB: npt.NDArray[np.uint8] | int,
        weight_version: int,
    ) -> None:
        """Write whole blocks that follow each other in their request.

        Args:
            leases_C: int64 `[C]`, under which the rows were computed, each blank.
            first_block: place of the first block in its request.
            ids_TLK: in the schema's dtype, contiguous.
            source: place in `ids_TLK` of the first row of the first block; the others follow it.
            origin_CB: uint8 `[C, block_size]`, or one origin for all.
            weight_version: version of the weights that ran, for all.
        """
        blocks_C, count = block_of(leases_C), len(leases_C)
        self._lease_PB[blocks_C] = leases_C[:, None]
        self._position_PB[blocks_C] = self._positions(first_block, count)
        self._version_PB[blocks_C] = weight_version
        self._origin_PB[blocks_C] = origin_CB
        self._ids.put_blocks(blocks_C, ids_TLK, source)

    def store_steps(
        self,
        slots_T: Index,
        leases_T: Index,
        positions_T: Index,
        steps: Sequence[RouteIds],
        *,
        origin: Origin,
        weight_version: int,
    ) -> bool:
        """Write the rows of N steps of one batch if every slot is open for its row; False, and no change, if not.

        Args:
            slots_T: int64 `[R * N]`, the slots of each request side by side, no slot twice.
            leases_T: int64 `[R * N]`, under which the rows were computed.
            positions_T: int64 `[R * N]`, of the rows in their request.
            steps: of each step, `[R, L, K]` in the schema's dtype, contiguous.
            origin: of all rows.
            weight_version: version of the weights that ran, for all.
        """
        if not self._open(slots_T, leases_T).all():
            return False
        self._tag(slots_T, leases_T, positions_T, int(origin), weight_version)
        self._ids.put_steps(slots_T.reshape(-1, len(steps)), steps)
        return True

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
        blocks_M = block_of(leases_M)
        positions_MB = self._positions(first_block, len(leases_M))
        # A block that does not exist is clipped to one whose lease is another.
        proven_MB = self._lease_PB.take(blocks_M, axis=0, mode="clip") == leases_M[:, None]
        proven_MB &= self._position_PB.take(blocks_M, axis=0, mode="clip") == positions_MB
        # Only a slot that was never written has the tag NO_LEASE, and its origin is ABSENT.
        origin_MB = self._origin_PB.take(blocks_M, axis=0, mode="clip")
        if not proven_MB.all():
            origin_MB[~proven_MB] = ABSENT
        version_MB = self._version_PB.take(blocks_M, axis=0, mode="clip")
        return self._ids.take_blocks(blocks_M), origin_MB.reshape(-1), version_MB.reshape(-1)

    def check(self) -> None:
        """Compare the tags with what can be true of them.

        Raises:
            IntegrityError: a slot has a tag that no write leaves.
        """
        block_S, offset_S = np.nonzero(self._lease_PB != NO_LEASE)
        lease_S = self._lease_PB[block_S, offset_S]
        right_S = block_of(lease_S) == block_S
        right_S &= lease_S <= self.lease_P[block_S]
        right_S &= self._position_PB[block_S, offset_S] % self.block_size == offset_S
        right_S &= self._origin_PB[block_S, offset_S] != ABSENT
        if not right_S.all():
            wrong = int(np.flatnonzero(~right_S)[0])
            at = int(block_S[wrong]), int(offset_S[wrong])
            raise IntegrityError(
                f"slot {at[0] * self.block_size + at[1]} is tagged lease {self._lease_PB[at]:#x},"
                f" position {self._position_PB[at]}, origin {self._origin_PB[at]}: no write leaves"
                " that there"
            )

    def _positions(self, first_block: int, num_blocks: int) -> npt.NDArray[np.int32]:
        """The positions of the rows of some blocks of a request, `[num_blocks, block_size]`."""
        start, stop = first_block * self.block_size, (first_block + num_blocks) * self.block_size
        return np.arange(start, stop, dtype=np.int32).reshape(num_blocks, self.block_size)

    def _present(self, leases: Index) -> Index:
        # A block that does not exist is clipped to one whose lease is another.
        present: Index = self.lease_P.take(block_of(leases), mode="clip")
        return present

    def _open(self, slots_T: Index, leases_T: Index) -> npt.NDArray[np.bool_]:
        """Whether the lease has not ended and the slot has no row under it, bool `[T]`."""
        open_T: npt.NDArray[np.bool_] = self._present(leases_T) == leases_T
        open_T &= self._lease_PB.reshape(-1)[slots_T] != leases_T
        return open_T

    def _tag(
        self,
        slots_T: Index,
        leases_T: Index,
        positions_T: Index,
        origin_T: npt.NDArray[np.uint8] | int,
        weight_version: int,
    ) -> None:
        self._lease_PB.reshape(-1)[slots_T] = leases_T
        self._position_PB.reshape(-1)[slots_T] = positions_T
        self._version_PB.reshape(-1)[slots_T] = weight_version
        self._origin_PB.reshape(-1)[slots_T] = origin_T
