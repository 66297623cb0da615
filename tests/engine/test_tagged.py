"""Rows that name their maker, under everything that scheduler and KV cache do."""

from __future__ import annotations

import pytest

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
    wanting = system.add([1] * 9, max_tokens=4, ignore_eos=True)
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
