"""Which KV blocks a request has, which it can share, and what the ledger has to know about it.

The positions of a request, from left to right, at the time a step is planned::

    | prefix hit | computed before | scheduled now | known, not scheduled |
    ^ shared blocks                ^ num_computed_tokens                  ^ num_tokens
    |<-------- block_ids cover this, rounded up ------->|

A block gets its hash when the step that fills it is planned, so that a request planned right after it in the same
step can share it already: attention writes the keys and values of a whole layer before it reads any.
"""

from __future__ import annotations

from collections.abc import Iterable

from routebook.engine.block_hash import extend_block_hashes
from routebook.engine.block_pool import BlockPool
from routebook.engine.request import Request
from routebook.ledger.base import Ledger


class KVCacheManager:
    """Block tables of the requests over one :class:`BlockPool`."""

    def __init__(
        self, pool: BlockPool, block_size: int, ledger: Ledger, prefix_caching: bool
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self._ledger = ledger
        self._prefix_caching = prefix_caching
        self._generation = 0

    def admit(self, request: Request, budget: int) -> int:
        """Give a waiting request its shared blocks and blocks for up to `budget` further tokens.

        Returns the number of tokens to schedule; 0 when the pool cannot hold them, and then nothing has changed.
        """
        hits = self._find_prefix(request)
        num_hit_tokens = len(hits) * self.block_size
        num_new_tokens = min(request.num_tokens - num_hit_tokens, budget)
        needed = self._num_blocks(num_hit_tokens + num_new_tokens) - len(hits)
        if needed + self.pool.num_free_among(hits) > self.pool.num_free:
            return 0
        self.pool.take(hits)
        request.block_ids = list(hits)
        request.num_computed_tokens = num_hit_tokens
        request.num_named_blocks = len(hits)
        self._ledger.share(request.request_id, request.block_hashes[: len(hits)])
        self._ledger.assign(request.request_id, hits)
        self._append_blocks(request, needed)
        return num_new_tokens

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Extend the blocks to hold the first `num_tokens` tokens; None when the pool is out of blocks."""
        needed = self._num_blocks(num_tokens) - len(request.block_ids)
        if needed <= 0:
            return []
        if needed > self.pool.num_free:
            return None
        return self._append_blocks(request, needed)

    def free(self, request: Request) -> None:
        """Give the request's blocks back; named ones stay findable until they are handed out again."""
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.num_named_blocks = 0
        request.num_computed_tokens = 0

    def name_full_blocks(self, request: Request) -> None:
        """Offer the blocks that are full, once the planned steps have run, to the prefix cache and the ledger.

        A block whose last token is still under way has no hash yet; it is offered when the token is known.
        """
        if not self._shares(request):
            return
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        full = num_tokens // self.block_size
        if full <= request.num_named_blocks:
            return
        self._extend_hashes(request, num_tokens)
        for index in range(request.num_named_blocks, full):
            self._name_block(request, index)
        request.num_named_blocks = full

    def reset_prefix_cache(self) -> None:
        """Forget every shared prefix; running requests go on.

        Blocks that they fill from now on rest on older ones, so their hashes must not match those of new requests:
        every generation has hashes of its own.
        """
        self._generation += 1
        self.pool.reset()
        self._ledger.reset()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Recount all blocks from the living requests. Raises IntegrityError."""
        self.pool.check_integrity(request.block_ids for request in requests)

    def _find_prefix(self, request: Request) -> list[int]:
        """Blocks to share: never the last token's, since its logits are needed."""
        if not self._shares(request):
            return []
        if request.hash_generation != self._generation:
            request.hash_generation = self._generation
            request.block_hashes = []
        self._extend_hashes(request, request.num_tokens)
        usable = (request.num_tokens - 1) // self.block_size
        hits = self.pool.find(request.block_hashes[:usable])
        if request.params.routed_experts:
            # A block whose rows nobody recorded is computed again rather than handed out without rows.
            hits = hits[: self._ledger.available(request.block_hashes[: len(hits)])]
        return hits

    def _name_block(self, request: Request, index: int) -> None:
        """Keep block and rows of one hash together: both from the same computation, or no rows at all."""
        block_id, block_hash = request.block_ids[index], request.block_hashes[index]
        has_rows = request.rows_from <= index * self.block_size
        if has_rows and not self._ledger.available([block_hash]):
            self.pool.rename(block_id, block_hash)
            self._ledger.publish(request.request_id, index, block_hash)
        else:
            self.pool.name(block_id, block_hash)

    def _shares(self, request: Request) -> bool:
        """Forced routes make other keys and values than the routers' own: they are not mixed."""
        return self._prefix_caching and not request.forced

    def _extend_hashes(self, request: Request, num_tokens: int) -> None:
        root = request.hash_generation.to_bytes(8, "little") + request.cache_salt
        tokens = request.token_ids[:num_tokens]
        extend_block_hashes(request.block_hashes, tokens, self.block_size, root)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _append_blocks(self, request: Request, count: int) -> list[int]:
        if count <= 0:
            return []
        block_ids, evicted = self.pool.allocate(count)
        if evicted:
            self._ledger.withdraw(evicted)
        self._ledger.assign(request.request_id, block_ids)
        request.block_ids += block_ids
        return block_ids
