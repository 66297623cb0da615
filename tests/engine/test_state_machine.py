"""No order of events loses, shifts or swaps a row: the state machine over the whole engine.

Every completion is compared row by row with the witness's account of the steps that ran. The totals are in the summary
at the end of the test run. `make soak` runs the same machine for longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import pytest

from routebook.engine.config import LEDGERS
from tests.engine.machine import TaggedMachine, TinyMachine, run_machine
from tests.engine.machine_report import PROPERTY
from tests.engine.totals import Totals

TAGGED_EXAMPLES = 330
TINY_EXAMPLES = 30

Record = Callable[[str, object], None]


@pytest.mark.parametrize("ledger", LEDGERS)
@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_rows_that_name_their_maker(
    steps_in_flight: int, ledger: str, record_property: Record
) -> None:
    totals = Totals()
    try:
        run_machine(
            TaggedMachine, TAGGED_EXAMPLES, totals, ledgers=(ledger,), depths=(steps_in_flight,)
        )
    finally:
        record_property(PROPERTY, asdict(totals))
    assert totals.examples >= TAGGED_EXAMPLES
    # A machine that never tried something says nothing about it.
    assert totals.missing() == ["rows_plain"]


@pytest.mark.parametrize("ledger", LEDGERS)
def test_rows_of_the_bundled_model(ledger: str, record_property: Record) -> None:
    totals = Totals()
    try:
        run_machine(TinyMachine, TINY_EXAMPLES, totals, ledgers=(ledger,))
    finally:
        record_property(PROPERTY, asdict(totals))
    assert totals.examples >= TINY_EXAMPLES
    assert totals.rows > 200
