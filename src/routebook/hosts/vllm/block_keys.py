"""Which content each KV block of vLLM's pool has, as keys under which the ledger publishes rows.

A key is the block's hash together with its number. The hash alone would not do: vLLM keeps several blocks of one hash
when requests compute the same tokens at the same time, and the rows of a hit are those of the very block that was hit.
The number alone would not do either: a key that names another content is not found, so rows of a block's former
content cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def block_key(block_hash: bytes, block_id: int) -> bytes:
    """The key of one KV block with one content."""
    return block_id.to_bytes(8, "little") + block_hash


class BlockKeys:
    """The present key of every KV block that has one."""

    def __init__(self) -> None:
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def name(self, block_id: int, block_hash: bytes) -> bytes:
        """The block is full of what the hash names; return its key."""
        key = self._key_of[block_id] = block_key(block_hash, block_id)
        return key

    def hand_out(self, block_ids: Iterable[int]) -> Sequence[bytes]:
        """These blocks were given to a request, to be filled anew; return the keys that end."""
        return [self._key_of.pop(b) for b in block_ids if b in self._key_of]

    def clear(self) -> None:
        """No block has a key any more."""
        self._key_of.clear()
