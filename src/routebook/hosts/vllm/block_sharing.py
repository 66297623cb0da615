"""Prefix caching: which KV blocks a request took from others, and which it fills for others.

vLLM names a block by its hash when the step that fills it is scheduled; another request can hit it in the same step.
The ledger is told in the same order, so it has the rows of a hit, or will have them when that step has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from routebook.hosts.vllm.block_keys import BlockKeys, block_key
from routebook.hosts.vllm.block_parts import BlockPart
from routebook.hosts.vllm.late_ledger import LateLedger
from routebook.hosts.vllm.tracked_request import TrackedRequest
from routebook.ledger import Ledger


class BlockSharing:
    """The KV blocks of all requests, as far as their rows are concerned.

    Args:
        late: the ledger.
    """

    def __init__(self, late: LateLedger) -> None:
        self.keys = BlockKeys()
        self._late = late

    def take(self, tracked: TrackedRequest | None, part: BlockPart) -> None:
        """A request was given blocks; a fresh run begins with those that it shares.

        Args:
            tracked: None for a request of which nothing is kept; its blocks are its own all the same.
            part: the blocks.
        """
        num_hits = part.start // self._late.block_size if part.is_fresh else 0
        if tracked is not None:
            if part.is_fresh:
                self._share(tracked, part.block_ids[:num_hits])
            tracked.block_ids += part.block_ids[num_hits:]
        self._hand_out(part.block_ids[num_hits:])

    def publish(self, tracked: TrackedRequest | None) -> None:
        """Offer blocks that are full, once all scheduled steps have run, and whose tokens are all known."""
        if tracked is None:
            return
        request, name = tracked.request, tracked.request_id
        full = min(request.num_computed_tokens, request.num_tokens) // self._late.block_size
        for index in range(tracked.num_published, full):
            key = self.keys.name(tracked.block_ids[index], request.block_hashes[index])
            self._late.do(_publish(name, index, key))
        tracked.num_published = max(full, tracked.num_published)

    def reset(self) -> None:
        """No block is shared any more."""
        self.keys.clear()
        self._late.do(lambda ledger: ledger.reset())

    def _share(self, tracked: TrackedRequest, block_ids: Iterable[int]) -> None:
        tracked.block_ids = list(block_ids)
        tracked.num_published = len(tracked.block_ids)
        # A block that was filled with anything else, or whose rows nobody kept, has another key or none.
        named = zip(tracked.request.block_hashes, tracked.block_ids, strict=False)
        keys = [block_key(block_hash, block_id) for block_hash, block_id in named]
        name = tracked.request_id
        self._late.do(lambda ledger: ledger.share(name, keys))

    def _hand_out(self, block_ids: Iterable[int]) -> None:
        """These blocks will be filled anew: rows of what they held before cannot be hit any more."""
        ended = self.keys.hand_out(block_ids)
        if ended:
            self._late.do(lambda ledger: ledger.withdraw(ended))


def _publish(request_id: str, index: int, key: bytes) -> Callable[[Ledger], None]:
    return lambda ledger: ledger.publish(request_id, index, key)
