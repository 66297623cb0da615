"""Rows that name their maker, under everything that scheduler and KV cache do."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from routebook.engine.config import LEDGERS
from routebook.engine.request import FinishReason
from tests.engine.tagged import VOCAB, TaggedSystem


@pytest.mark.parametrize("ledger", LEDGERS)
@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_shared_prefixes_chunks_and_starvation(
    budget: int, block_size: int, steps_in_flight: int, ledger: str
) -> None:
    system = TaggedSystem(
        num_blocks=80 // block_size,
        block_size=block_size,
        budget=budget,
        steps_in_flight=steps_in_flight,
        ledger=ledger,
    )
    prefix = [1 + i % (VOCAB - 1) for i in range(33)]
    for n in range(12):
        system.add(prefix[: 20 + n] + [n + 1] * (n % 3), max_tokens=5 + 3 * n, ignore_eos=True)
        system.step()
    system.run()
    system.scheduler.check_integrity()
    assert system.rows_from_cache > 100
    # With a budget of one token the oldest request runs alone, and nothing has to yield.
    assert (system.scheduler.num_preemptions > 0) == (budget > 1)
    assert system.rows_compared > 300


def test_requests_of_one_step_share_the_prefix_that_the_step_computes() -> None:
    system = TaggedSystem(num_blocks=32, block_size=4, budget=64)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    first, second = (system.add(prompt, max_tokens=2) for _ in range(2))
    plan = system.scheduler.schedule()
    assert plan is not None
    assert plan.num_scheduled_tokens == {first.request_id: 9, second.request_id: 1}
    system.runner.execute(plan)


@pytest.mark.parametrize("ledger", LEDGERS)
def test_rows_of_a_cached_block_follow_its_owner_not_the_block(ledger: str) -> None:
    """A block is computed, shared, evicted, and its memory used by another request: nothing shows through."""
    system = TaggedSystem(num_blocks=6, block_size=4, budget=64, ledger=ledger)
    system.add([1] * 9, max_tokens=2)
    system.run()
    sharer = system.add([1] * 9, max_tokens=12)
    system.step()
    assert sharer.num_computed_tokens == 9
    system.add([2] * 9, max_tokens=3)
    system.run()
    system.add([1] * 9, max_tokens=2)
    system.run()
    assert system.rows_from_cache == 16


def test_a_request_without_rows_costs_no_capture_and_gives_none_away() -> None:
    system = TaggedSystem(num_blocks=32, block_size=4, budget=64)
    system.add([1] * 9, max_tokens=4, rows=False)
    plan = system.scheduler.schedule()
    assert plan is not None
    assert not plan.capture
    system = TaggedSystem(num_blocks=32, block_size=4, budget=64)
    system.add([1] * 9, max_tokens=4, rows=False)
    system.run()
    wanting = system.add([1] * 9, max_tokens=4)
    plan = system.scheduler.schedule()
    assert plan is not None
    # The cached blocks have no rows, so they are computed again rather than handed out without.
    assert plan.capture
    assert plan.num_scheduled_tokens == {wanting.request_id: 9}
    system.scheduler.update_from_output(plan, system.runner.execute(plan))
    system.run()
    assert system.rows_compared == 12
    sharer = system.add([1] * 9, max_tokens=1)
    plan = system.scheduler.schedule()
    assert plan is not None
    assert plan.num_scheduled_tokens == {sharer.request_id: 1}


def test_absent_rows_are_marked_not_invented() -> None:
    """Aborted before it ran at all: no position has a row."""
    system = TaggedSystem(num_blocks=8, block_size=4, budget=64)
    request = system.add([1, 2, 3, 4, 5], max_tokens=4)
    system.scheduler.finish(request, FinishReason.ABORT)
    record = system.close(request)
    assert record is not None
    assert record.num_rows == 4
    assert not record.valid_T.any()


class TaggedMachine(RuleBasedStateMachine):
    """Any order of arrivals, steps, aborts and cache resets over a pool that is too small."""

    @initialize(
        block_size=st.sampled_from([1, 4, 16]),
        budget=st.sampled_from([1, 7, 64]),
        blocks=st.integers(2, 12),
        steps_in_flight=st.integers(1, 3),
        ledger=st.sampled_from(LEDGERS),
    )
    def start(
        self, block_size: int, budget: int, blocks: int, steps_in_flight: int, ledger: str
    ) -> None:
        num_blocks = blocks * 16 // block_size
        self.system = TaggedSystem(
            num_blocks=num_blocks,
            block_size=block_size,
            budget=budget,
            steps_in_flight=steps_in_flight,
            ledger=ledger,
        )
        self.limit = num_blocks * block_size

    @rule(
        prefix=st.integers(0, 40),
        kind=st.integers(0, 2),
        tail=st.lists(st.integers(1, 3), max_size=4),
        max_tokens=st.integers(1, 30),
        rows=st.booleans(),
    )
    def add(self, prefix: int, kind: int, tail: list[int], max_tokens: int, rows: bool) -> None:
        prompt = ([1 + kind] * prefix + tail)[: self.limit - 1] or [1]
        start = len(prompt) // 2 if kind == 2 else 0
        self.system.add(prompt, max_tokens=max_tokens, rows=rows, start=start)

    @precondition(lambda self: self.system.has_work)
    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.system.has_work:
                self.system.step()

    @precondition(lambda self: self.system.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        requests = list(self.system.scheduler.requests.values())
        self.system.abort(data.draw(st.sampled_from(requests), label="aborted"))

    @rule()
    def reset(self) -> None:
        self.system.scheduler.cache.reset_prefix_cache()

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "system"):
            self.system.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "system"):
            self.system.run()
            self.system.scheduler.check_integrity()


TestTaggedMachine = TaggedMachine.TestCase
TestTaggedMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
