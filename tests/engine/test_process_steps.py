"""Steps across the border to a worker's process: forced routes, small steady steps, and a plan that does not follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from routebook.engine.llm import LLM
from routebook.engine.wire_delta import ContinueStep, RunStep
from tests.engine.test_process_executor import (
    LONG,
    OPTIONS,
    PROSE,
    check_ended_by,
    check_refusing,
    child_of,
    contents,
    inline,
    noisy_weights,
    set_depth,
    step_until_it_fails,
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The bundled model in a process; every test leaves it idle, with its own weights."""
    llm = LLM("tiny", executor="process", **OPTIONS)
    yield llm
    llm.shutdown()


def forced_again(llm: LLM, steps_in_flight: int) -> list[Any]:
    """A completion that was aborted under some weights and goes on under others, forced along its rows or not."""
    set_depth(llm, steps_in_flight)
    engine = llm.engine
    llm.update_weights("tiny")
    request_id = engine.add_request(engine.tokenize(PROSE[:40]), LONG)
    for _ in range(20):
        engine.step()
    first = engine.abort(request_id)
    assert first is not None
    while engine.has_work:
        engine.step()
    (choice,) = first.choices
    tokens, record = list(first.prompt_token_ids + choice.token_ids), choice.routed_experts
    assert record is not None
    llm.update_weights(noisy_weights())
    num_preemptions = engine.scheduler.num_preemptions
    # Beside a rival that takes its blocks away, so that the rows are told to the worker twice.
    params = replace(LONG, max_tokens=30, logprobs=0)
    forced = llm.generate([PROSE[:40], tokens], params, records=[None, record], forced=True)
    assert engine.scheduler.num_preemptions > num_preemptions
    (free,) = llm.generate([tokens], params, records=[record])
    whole = forced[1].choices[0].routed_experts
    assert whole is not None
    assert whole.truncate(record.stop) == record
    llm.check_integrity()
    llm.update_weights("tiny")
    return [contents(forced), contents([free])]


@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_forced_routes_cross_the_border(llm: LLM, steps_in_flight: int) -> None:
    forced, free = forced_again(llm, steps_in_flight)
    assert [forced, free] == forced_again(inline(), steps_in_flight)
    # Keys and values along the old rows make other log-probabilities than those of the new weights' own routes.
    pairs = zip(forced[1][3], free[0][3], strict=True)
    assert max(abs(one.logprob - other.logprob) for one, other in pairs) > 1e-2


def test_steady_steps_are_told_by_what_changed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[type] = []
    child = child_of(llm)
    tell = child.tell

    def note(message: Any) -> None:
        told.append(type(message))
        tell(message)

    monkeypatch.setattr(child, "tell", note)
    llm.generate([PROSE[:20], PROSE[:30]], LONG)
    assert told.count(ContinueStep) >= 38
    assert RunStep not in told


def test_a_plan_that_does_not_follow_the_last_one_is_refused_and_told(llm: LLM) -> None:
    set_depth(llm, 2)
    llm.engine.reset_prefix_cache()
    before = llm.generate(PROSE[:40], LONG)
    llm.engine.reset_prefix_cache()
    ids = [llm.engine.add_request(llm.engine.tokenize(PROSE[:40]), LONG) for _ in range(2)]
    for _ in range(5):
        llm.engine.step()
    # As if a step had been lost on its way.
    child_of(llm)._plans.write(replace(child_of(llm)._plans._last, weight_version=7))
    error = step_until_it_fails(llm)
    assert "is not the one that the engine planned" in str(error)
    assert list(error.request_ids) == ids
    check_ended_by(error, llm.engine.step(), before[0])
    check_refusing(llm, error)
    llm.restart()
    assert contents(llm.generate(PROSE[:40], LONG)) == contents(before)
