"""A KV block pool that is out for trouble: what was freed last is handed out first, hashed blocks last."""

from __future__ import annotations

from collections.abc import Sequence


class FakeKVPool:
    """Block tables, reference counts and hashes, without any content.

    Each method that hands blocks out returns them and the hashes that were evicted with them.
    """

    def __init__(self, num_blocks: int) -> None:
        self.tables: dict[str, list[int]] = {}
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks))
        self._free_hashed: dict[int, None] = {}
        self._hashes: dict[int, set[bytes]] = {}
        self._block_of: dict[bytes, int] = {}

    def share(self, request_id: str, hashes: Sequence[bytes]) -> tuple[list[int], list[bytes]]:
        """Begin a block table with hits. For an unknown hash it has some block: the rows in it are no one's."""
        known = [self._block_of.get(block_hash) for block_hash in hashes]
        for block in known:
            if block is not None:
                self._use(block)
        evicted: list[bytes] = []
        table = [self._hand_out(evicted) if block is None else block for block in known]
        self.tables[request_id] = table
        return list(table), evicted

    def cover(self, request_id: str, num_blocks: int) -> tuple[list[int], list[bytes]]:
        """Extend a block table to at least `num_blocks` blocks."""
        table = self.tables.setdefault(request_id, [])
        evicted: list[bytes] = []
        new = [self._hand_out(evicted) for _ in range(len(table), num_blocks)]
        table += new
        return new, evicted

    def name(self, request_id: str, block_index: int, block_hash: bytes) -> None:
        """Make a block findable; a hash that is taken keeps its block."""
        block = self.tables[request_id][block_index]
        if self._block_of.setdefault(block_hash, block) == block:
            self._hashes.setdefault(block, set()).add(block_hash)

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Forget hashes; a free block without one is the next to be handed out."""
        for block_hash in hashes:
            block = self._block_of.pop(block_hash, None)
            if block is not None:
                self._hashes[block].remove(block_hash)
                if not self._hashes[block] and block in self._free_hashed:
                    del self._free_hashed[block]
                    self._free.append(block)

    def release(self, request_id: str) -> None:
        """Free a request's blocks, so that the next request gets the first one as its first one."""
        for block in reversed(self.tables.pop(request_id, [])):
            self._references[block] -= 1
            if not self._references[block]:
                if self._hashes.get(block):
                    self._free_hashed[block] = None
                else:
                    self._free.append(block)

    def _use(self, block: int) -> None:
        self._free_hashed.pop(block, None)
        self._references[block] += 1

    def _hand_out(self, evicted: list[bytes]) -> int:
        if self._free:
            block = self._free.pop()
        else:
            assert self._free_hashed, "the schedule needs more KV blocks than the pool has"
            block = next(iter(self._free_hashed))
            hashes = sorted(self._hashes[block])
            evicted += hashes
            self.forget(hashes)
            self._free.remove(block)
        self._references[block] += 1
        return block
