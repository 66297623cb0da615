"""What all parts of the suite have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from routebook.errors import LedgerError
from routebook.ledger.base import Ledger
from routebook.ledger.conformance.pair import NUM_BLOCKS, TAG_SCHEMA, LedgerPair
from routebook.routes.schema import RouteSchema

A, B, C, D = "a", "b", "c", "d"
H0, H1, H2 = b"h0", b"h1", b"h2"


class ConformanceCase(ABC):
    """A part of the suite; blocks have four tokens unless said."""

    @abstractmethod
    def make_ledger(self, schema: RouteSchema, block_size: int, num_blocks: int) -> Ledger:
        """Return a new, empty ledger for a KV pool of `num_blocks` blocks."""

    def make_pair(self, block_size: int = 4) -> LedgerPair:
        """A new ledger and its oracle."""
        return LedgerPair(self.make_ledger(TAG_SCHEMA, block_size, NUM_BLOCKS))


def refuses(call: Callable[[], object], *words: str) -> None:
    """Assert that a call raises LedgerError, and that the message holds these words."""
    message = None
    try:
        call()
    except LedgerError as error:
        message = str(error)
    assert message is not None, f"no LedgerError with {words}"
    assert all(word in message for word in words), f"{message!r} lacks one of {words}"
