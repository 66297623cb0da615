"""All parts of the suite as one class."""

from __future__ import annotations

from routebook.ledger.conformance.block_reuse import BlockReuseConformance
from routebook.ledger.conformance.decodes import DecodesConformance
from routebook.ledger.conformance.limits import LimitsConformance
from routebook.ledger.conformance.long_steps import LongStepsConformance
from routebook.ledger.conformance.preemption import PreemptionConformance
from routebook.ledger.conformance.random_walks import RandomWalkConformance
from routebook.ledger.conformance.recomputation import RecomputationConformance
from routebook.ledger.conformance.rows import RowsConformance
from routebook.ledger.conformance.sharing import SharingConformance


class LedgerConformance(
    RowsConformance,
    DecodesConformance,
    LongStepsConformance,
    SharingConformance,
    PreemptionConformance,
    RecomputationConformance,
    BlockReuseConformance,
    LimitsConformance,
    RandomWalkConformance,
):
    """Every sentence of the contract in `ledger/base.py`, against an oracle of dictionaries.

    It asks a ledger for what its `recompute` promises; run it once for each choice.
    """
