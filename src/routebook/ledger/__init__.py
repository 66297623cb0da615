"""The scheduler's side: who owns which row, from the step that made it to the answer that carries it."""

from routebook.ledger.base import Ledger, LedgerUsage, ReleaseReason, RowRange, StepRows
from routebook.ledger.kv_slot_ledger import KVSlotConfig, KVSlotLedger
from routebook.ledger.request_ledger import LedgerConfig, RequestLedger
from routebook.ledger.row_pool import RowPool
from routebook.ledger.slot_rows import RoutedExpertsManager
from routebook.ledger.snapshot_cache import RoutedExpertsCache

__all__ = [
    "KVSlotConfig",
    "KVSlotLedger",
    "Ledger",
    "LedgerConfig",
    "LedgerUsage",
    "ReleaseReason",
    "RequestLedger",
    "RoutedExpertsCache",
    "RoutedExpertsManager",
    "RowPool",
    "RowRange",
    "StepRows",
]
