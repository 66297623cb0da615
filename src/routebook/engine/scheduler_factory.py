"""The scheduler of an engine, with the block pool, the prefix cache and the ledger that it works over."""

from __future__ import annotations

from routebook.engine.block_pool import BlockPool
from routebook.engine.config import CacheConfig, EngineConfig
from routebook.engine.kv_cache_manager import KVCacheManager
from routebook.engine.scheduler import Scheduler
from routebook.engine.served_model import ServedModel
from routebook.ledger import KVSlotConfig, KVSlotLedger, Ledger, LedgerConfig, RequestLedger


def make_scheduler(config: EngineConfig, served: ServedModel) -> Scheduler:
    """A scheduler that knows of no request and no prefix.

    Args:
        config: options of the engine.
        served: the model, as its worker described it.
    """
    cache = config.cache
    ledger = _make_ledger(cache, served)
    # The state of a recurrent layer is not in the KV blocks, so such a prefix cannot be shared.
    caching = cache.prefix_caching and not served.is_recurrent
    manager = KVCacheManager(BlockPool(served.num_blocks), cache.block_size, ledger, caching)
    return Scheduler(config.scheduler, manager, ledger, eos_token_ids=served.eos_token_ids)


def _make_ledger(cache: CacheConfig, served: ServedModel) -> Ledger:
    schema, size = served.schema, cache.block_size
    if cache.ledger == "slot":
        slot_config = KVSlotConfig(recompute=cache.recompute)
        return KVSlotLedger(schema, size, served.num_blocks, slot_config)
    return RequestLedger(schema, size, LedgerConfig(recompute=cache.recompute))
