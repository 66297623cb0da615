"""Both ledgers pass the shipped conformance suite, from several sizes of their memory, under either choice of rows."""

from __future__ import annotations

from routebook.ledger import KVSlotConfig, KVSlotLedger, Ledger, LedgerConfig, RequestLedger
from routebook.ledger.conformance import LedgerConformance
from routebook.routes.schema import RouteSchema


class TestRequestLedger(LedgerConformance):
    def make_ledger(self, schema: RouteSchema, block_size: int, num_blocks: int) -> Ledger:
        return RequestLedger(schema, block_size)


class TestGrowingRequestLedger(LedgerConformance):
    """Starts with one chunk and grows by little, so that growth happens in every place."""

    def make_ledger(self, schema: RouteSchema, block_size: int, num_blocks: int) -> Ledger:
        config = LedgerConfig(initial_rows=1, growth_factor=1.1)
        return RequestLedger(schema, block_size, config)


class TestLatestRequestLedger(LedgerConformance):
    def make_ledger(self, schema: RouteSchema, block_size: int, num_blocks: int) -> Ledger:
        config = LedgerConfig(recompute="latest", growth_factor=1.5)
        return RequestLedger(schema, block_size, config)


class TestLatestKVSlotLedger(LedgerConformance):
    def make_ledger(self, schema: RouteSchema, block_size: int, num_blocks: int) -> Ledger:
        config = KVSlotConfig(recompute="latest")
        return KVSlotLedger(schema, block_size, num_blocks, config)


class TestKVSlotLedger(LedgerConformance):
    def make_ledger(self, schema: RouteSchema, block_size: int, num_blocks: int) -> Ledger:
        return KVSlotLedger(schema, block_size, num_blocks)


class TestGrowingKVSlotLedger(LedgerConformance):
    """Has room for one request at the start."""

    def make_ledger(self, schema: RouteSchema, block_size: int, num_blocks: int) -> Ledger:
        config = KVSlotConfig(initial_requests=1)
        return KVSlotLedger(schema, block_size, num_blocks, config)
