"""Ownership of the KV blocks: who uses which, which are free, which are still worth finding.

A block is in exactly one state::

    free, no hash      in the queue, content worthless
    free, hashed       in the queue, content reusable until it is handed out (eviction)
    used               reference count >= 1, not in the queue

The queue is least recently freed first. It is a dict used as an ordered set, so that a hit in the middle of the
queue leaves it in constant time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from routebook.errors import IntegrityError


class BlockPool:
    """Reference counts, free queue and hash table of `num_blocks` KV blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: dict[int, None] = dict.fromkeys(range(num_blocks))
        self._hash_of_block: dict[int, bytes] = {}
        self._block_of_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free)

    def find(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest leading run of hashes that the pool holds."""
        found: list[int] = []
        for block_hash in block_hashes:
            block_id = self._block_of_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks lie in the free queue now."""
        return sum(block_id in self._free for block_id in block_ids)

    def take(self, block_ids: Iterable[int]) -> None:
        """Use blocks that `find` returned."""
        for block_id in block_ids:
            self._free.pop(block_id, None)
            self._references[block_id] += 1

    def allocate(self, count: int) -> tuple[list[int], list[bytes]]:
        """Hand out `count` blocks; return them and the hashes evicted with them. The caller checks `num_free`."""
        assert count <= self.num_free, "allocate more blocks than are free"
        block_ids, evicted = [], []
        for _ in range(count):
            block_id = next(iter(self._free))
            del self._free[block_id]
            self._references[block_id] = 1
            block_ids.append(block_id)
            block_hash = self._hash_of_block.pop(block_id, None)
            if block_hash is not None:
                del self._block_of_hash[block_hash]
                evicted.append(block_hash)
        return block_ids, evicted

    def free(self, block_ids: Sequence[int]) -> None:
        """Give up one reference each. The tail goes first into the queue, since a prefix is worth more."""
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            assert self._references[block_id] >= 0, f"block {block_id} freed twice"
            if self._references[block_id] == 0:
                self._free[block_id] = None

    def name(self, block_id: int, block_hash: bytes) -> None:
        """Make a used block findable; a hash that is taken keeps its block."""
        if block_hash not in self._block_of_hash:
            self.rename(block_id, block_hash)

    def rename(self, block_id: int, block_hash: bytes) -> None:
        """Make a used block the one that is found under this hash; the block found before loses it."""
        assert self._references[block_id] > 0, f"name block {block_id}, which nobody uses"
        before = self._block_of_hash.pop(block_hash, None)
        if before is not None:
            del self._hash_of_block[before]
        assert block_id not in self._hash_of_block, f"block {block_id} has a hash already"
        self._block_of_hash[block_hash] = block_id
        self._hash_of_block[block_id] = block_hash

    def reset(self) -> None:
        """Forget every hash; used blocks stay used."""
        self._hash_of_block.clear()
        self._block_of_hash.clear()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Recount references from the block tables of all living requests.

        Raises:
            IntegrityError: a leaked, doubly owned or lost block.
        """
        counted = [0] * self.num_blocks
        for table in tables:
            for block_id in table:
                counted[block_id] += 1
        for block_id, (held, seen) in enumerate(zip(self._references, counted, strict=True)):
            if held != seen:
                raise IntegrityError(f"KV block {block_id}: {held} references held, {seen} in use")
            if (held == 0) != (block_id in self._free):
                raise IntegrityError(f"KV block {block_id}: {held} references, free={held > 0}")
        if {h: b for b, h in self._hash_of_block.items()} != self._block_of_hash:
            raise IntegrityError("the hash table of the KV blocks contradicts itself")
