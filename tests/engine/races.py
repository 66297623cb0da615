"""Scenarios in which asynchronous scheduling could lose, shift or swap rows; see `test_races.py`."""

from __future__ import annotations

from typing import Any

from routebook.engine.request import Request, RequestStatus
from routebook.errors import LedgerError
from tests.engine.tagged import TaggedSystem


class Race(TaggedSystem):
    """A system that goes on when a record is wrong, and notes it; it also notes the races themselves."""

    def __init__(self, ledger: str, *, num_blocks: int, steps_in_flight: int = 2) -> None:
        super().__init__(
            num_blocks=num_blocks,
            block_size=4,
            budget=64,
            steps_in_flight=steps_in_flight,
            ledger=ledger,
        )
        self.faults: list[str] = []
        self.preempted_under_way = 0
        """Requests that lost their blocks while a step that ran them was not stored."""
        self.reused_unread = 0
        """Blocks that were handed out while their last owner was still to be read."""
        self._last_owner: dict[int, Request] = {}
        self._watch_preemptions()
        self._watch_blocks()

    def close(self, request: Request) -> Any:
        try:
            return super().close(request)
        except AssertionError as error:
            self.faults.append(str(error))

    def run(self) -> None:
        try:
            super().run()
        except LedgerError as error:
            self.faults.append(str(error))

    def plan(self) -> None:
        """Plan and run a step; its results are on their way."""
        plan = self.scheduler.schedule()
        assert plan is not None
        self.in_flight.append((plan, self.runner.execute(plan)))

    def take_results(self) -> list[Request]:
        """Take the oldest step's results; who ends in it is not read yet."""
        updated = self.scheduler.update_from_output(*self.in_flight.popleft())
        return [request for request in updated if request.status is RequestStatus.FINISHED]

    def _watch_preemptions(self) -> None:
        preempt = self.scheduler._preempt

        def noting(request: Request) -> None:
            under_way = any(request.request_id in plan.runs for plan, _ in self.in_flight)
            self.preempted_under_way += under_way
            preempt(request)

        self.scheduler._preempt = noting  # type: ignore[method-assign]

    def _watch_blocks(self) -> None:
        cache = self.scheduler.cache
        free, append = cache.free, cache._append_blocks

        def noting_free(request: Request) -> None:
            self._last_owner.update(dict.fromkeys(request.block_ids, request))
            free(request)

        def noting_append(request: Request, count: int) -> list[int]:
            blocks = append(request, count)
            owners = [self._last_owner.pop(block, request) for block in blocks]
            living = self.scheduler.requests.values()
            self.reused_unread += sum(o is not request and o in living for o in owners)
            return blocks

        cache.free = noting_free  # type: ignore[method-assign]
        cache._append_blocks = noting_append  # type: ignore[method-assign]


def overwritten_by_the_next_step(ledger: str, steps_in_flight: int = 2) -> Race:
    """Two requests decode side by side; the next steps have run when a step's rows are stored."""
    race = Race(ledger, num_blocks=12, steps_in_flight=steps_in_flight)
    race.add([1] * 6, max_tokens=8, ignore_eos=True)
    race.add([2] * 5, max_tokens=8, ignore_eos=True)
    race.run()
    return race


def preempted_with_a_step_under_way(ledger: str) -> Race:
    """The younger of two requests loses its blocks to the older one, and is computed again; a third shares them."""
    race = Race(ledger, num_blocks=4)
    race.add([1] * 6, max_tokens=10, ignore_eos=True)
    younger = race.add([2] * 6, max_tokens=10, ignore_eos=True)
    race.run()
    assert race.preempted_under_way == 1
    # The older one writes to all blocks of the younger one, of whom some rows are not even stored yet.
    assert race.reused_unread == 2 or race.faults
    if not race.faults:
        race.add(younger.token_ids[:9], max_tokens=2, ignore_eos=True)
        race.run()
        assert race.rows_from_cache == 8 or race.faults
    return race


def read_after_the_next_plan(ledger: str) -> Race:
    """The record of a request that ended is made late: its blocks have a new owner, whose rows are stored by then."""
    race = Race(ledger, num_blocks=2)
    race.add([1] * 7, max_tokens=1, ignore_eos=True)
    race.add([2] * 7, max_tokens=1, ignore_eos=True)
    ended = []
    for _ in range(2):
        race.plan()
        ended += race.take_results()
    assert race.reused_unread == 2
    for request in ended:
        race.close(request)
    return race


def aborted_in_the_blocks_of_another(ledger: str) -> Race:
    """A request takes over the only blocks there are, and is aborted before its first step is stored."""
    race = Race(ledger, num_blocks=2)
    race.add([1] * 7, max_tokens=2, ignore_eos=True)
    race.run()
    heir = race.add([2] * 8, max_tokens=2, ignore_eos=True)
    race.plan()
    assert heir.block_ids
    race.abort(heir)
    race.run()
    return race


def shared_while_the_owner_goes(ledger: str) -> Race:
    """A request shares a prefix whose owner ends, the prefix is forgotten, and a stranger comes."""
    race = Race(ledger, num_blocks=12, steps_in_flight=1)
    race.add([1] * 9, max_tokens=1, ignore_eos=True)
    race.step()
    sharer = race.add([1] * 9, max_tokens=8, ignore_eos=True)
    race.step()
    assert len(sharer.block_ids) == 3
    race.scheduler.cache.reset_prefix_cache()
    race.add([2] * 14, max_tokens=2, ignore_eos=True)
    race.run()
    assert race.rows_from_cache == 8 or race.faults
    return race
