"""Every order in which an abort, the steps in flight and the end of the request can meet, one by one.

A schedule is a word over plan, deliver and abort. All words that a small request allows are tried: whatever happens
when, the aborted request has a row for every token but the last one, or says which rows are not there and why: they
were being computed by a step whose results the abort did not wait for.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from routebook.engine.config import LEDGERS
from routebook.engine.request import FinishReason, Request, RequestStatus
from routebook.routes.record import RoutedExperts
from tests.engine.tagged import TaggedSystem

PROMPT = [5, 6, 7]


class Schedule:
    """One request, perhaps with a rival that shares its prefix, driven event by event."""

    def __init__(
        self, *, block_size: int, budget: int, depth: int, rival: bool, ledger: str
    ) -> None:
        self.system = TaggedSystem(
            num_blocks=12 // block_size,
            block_size=block_size,
            budget=budget,
            steps_in_flight=depth,
            ledger=ledger,
        )
        if rival:
            self.system.add(PROMPT, max_tokens=4, ignore_eos=True)
        self.request: Request = self.system.add(PROMPT, max_tokens=3, ignore_eos=True)
        self.record: RoutedExperts | None = None
        self.depth = depth

    @property
    def is_open(self) -> bool:
        return self.request.request_id in self.system.scheduler.requests

    def events(self) -> Iterator[str]:
        """What can happen next; planning is tried on a copy of nothing, so it may turn out empty."""
        if len(self.system.in_flight) < self.depth and self.system.scheduler.has_work:
            yield "p"
        if self.system.in_flight:
            yield "d"
        if self.is_open:
            yield "a"

    def happen(self, event: str) -> bool:
        """Let an event happen; returns whether it changed anything."""
        system = self.system
        if event == "p":
            plan = system.scheduler.schedule()
            if plan is not None:
                system.in_flight.append((plan, system.runner.execute(plan)))
            return plan is not None
        if event == "d":
            updated = system.scheduler.update_from_output(*system.in_flight.popleft())
            for request in updated:
                if request.status is RequestStatus.FINISHED:
                    self._close(request)
            return True
        system.scheduler.finish(self.request, FinishReason.ABORT)
        self._close(self.request)
        return True

    def _close(self, request: Request) -> None:
        record = self.system.close(request)
        if request is self.request:
            self.record = record


def words(**config: int | bool | str) -> Iterator[tuple[str, Schedule]]:
    """All complete words: those after which nothing is open and nothing under way."""
    pending = [""]
    while pending:
        word = pending.pop()
        schedule = Schedule(**config)  # type: ignore[arg-type]
        if not all(schedule.happen(event) for event in word):
            continue
        following = list(schedule.events())
        if not following:
            yield word, schedule
        pending += [word + event for event in following]


@pytest.mark.parametrize("ledger", LEDGERS)
@pytest.mark.parametrize("rival", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("block_size", "budget"), [(1, 2), (4, 8)])
def test_every_order_of_abort_step_and_end(
    block_size: int, budget: int, depth: int, rival: bool, ledger: str
) -> None:
    count = aborted = 0
    for word, schedule in words(
        block_size=block_size, budget=budget, depth=depth, rival=rival, ledger=ledger
    ):
        record, request = schedule.record, schedule.request
        assert record is not None, word
        assert record.num_rows == request.num_tokens - 1, word
        if request.output_token_ids:
            # Each generated token was delivered after all rows before it.
            assert record.complete, word
        schedule.system.scheduler.check_integrity()
        count += 1
        aborted += "a" in word
    assert count > 5
    assert 0 < aborted < count
