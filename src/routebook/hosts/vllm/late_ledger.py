"""A ledger whose schema becomes known with the first step that has run.

vLLM builds its scheduler from a config; which layers route, and among how many experts, the model's modules tell, in
the worker. Requests are begun and planned before the worker's first answer, so what concerns them waits until then.
"""

from __future__ import annotations

from collections.abc import Callable

from routebook.ledger import Ledger, RequestLedger
from routebook.routes.schema import RouteSchema


class LateLedger:
    """Calls of a ledger that are kept until the ledger can be made.

    Args:
        block_size: tokens per KV block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._ledger: Ledger | None = None
        self._calls: list[Callable[[Ledger], None]] = []

    def do(self, call: Callable[[Ledger], None]) -> None:
        """Make a call that has no answer, now or as soon as the schema is known; the order stays."""
        if self._ledger is None:
            self._calls.append(call)
        else:
            call(self._ledger)

    def open(self, schema: RouteSchema) -> Ledger:
        """Return the ledger, made when this is called first.

        Args:
            schema: the model's, the same in every call.
        """
        if self._ledger is None:
            self._ledger = RequestLedger(schema, self.block_size)
            for call in self._calls:
                call(self._ledger)
            self._calls.clear()
        assert self._ledger.schema == schema, "the worker's schema changed"
        return self._ledger

    @property
    def ledger(self) -> Ledger | None:
        """The ledger, or None as long as no step has run."""
        return self._ledger
