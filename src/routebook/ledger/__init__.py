"""The scheduler's side: who owns which row, from the step that made it to the answer that carries it."""

from routebook.ledger.base import Ledger, LedgerUsage, ReleaseReason, RowRange, StepRows
from routebook.ledger.request_ledger import LedgerConfig, RequestLedger
from routebook.ledger.row_pool import RowPool

__all__ = [
    "Ledger",
    "LedgerConfig",
    "LedgerUsage",
    "ReleaseReason",
    "RequestLedger",
    "RowPool",
    "RowRange",
    "StepRows",
]
