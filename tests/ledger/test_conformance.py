"""RequestLedger passes the shipped conformance suite, from several sizes of its memory."""

from __future__ import annotations

from routebook.ledger import Ledger, LedgerConfig, RequestLedger
from routebook.ledger.conformance import LedgerConformance
from routebook.routes.schema import RouteSchema


class TestDefaults(LedgerConformance):
    def make_ledger(self, schema: RouteSchema, block_size: int) -> Ledger:
        return RequestLedger(schema, block_size)


class TestGrowing(LedgerConformance):
    """Starts with one chunk and grows by little, so that growth happens in every place."""

    def make_ledger(self, schema: RouteSchema, block_size: int) -> Ledger:
        config = LedgerConfig(initial_rows=1, growth_factor=1.1)
        return RequestLedger(schema, block_size, config)
