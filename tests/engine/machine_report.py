"""A pytest plugin: the summary says what the state machine did, also when its tests ran in several processes."""

from __future__ import annotations

import pytest

from tests.engine.totals import Totals

PROPERTY = "state machine"
"""Name under which a test records its totals."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    totals = Totals()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                for name, value in report.user_properties:
                    if name == PROPERTY:
                        totals.add(Totals(**value))
    if totals.examples:
        terminalreporter.write_line(f"{PROPERTY}: {totals}")
