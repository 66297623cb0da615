"""Ctrl-C at any moment of a generation: what is half changed is finished first, or the engine says that it stopped."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import routebook
from routebook.engine.config import LEDGERS
from routebook.engine.interrupts import interrupts_held
from routebook.engine.llm import LLM
from routebook.engine.outputs import RequestOutput
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import WorkerError
from tests.families import SERVED

ROOT = str(Path(routebook.__file__).parent)
PROMPTS = [[7, 3, 11, 5, 19, 2, 23, 29, 31], [7, 3, 11, 5, 19, 2, 8], [9, 9, 4]]
PARAMS = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
MOMENTS = 30


@pytest.fixture(autouse=True)
def _listening() -> Any:
    """A job in the background inherits a deaf ear for interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupter:
    """Interrupts this process at one of the calls of functions in Routebook, from a moment on that it is told."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.calls = 0

    def start(self) -> None:
        sys.setprofile(self._count)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            self.calls += 1
            if self.calls == self.at:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)


def generate(llm: LLM, interrupter: Interrupter, patch: pytest.MonkeyPatch) -> list[RequestOutput]:
    """Requests are queued in peace; from the first step on an interrupt may come."""
    step = llm.engine.step

    def first_step() -> list[RequestOutput]:
        patch.setattr(llm.engine, "step", step)
        interrupter.start()
        return step()

    patch.setattr(llm.engine, "step", first_step)
    try:
        return llm.generate(PROMPTS, PARAMS)
    finally:
        sys.setprofile(None)


def contents(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (choice.token_ids, record and record.ids_TLK.tolist(), record and record.valid_T.all())
        for output in outputs
        for choice in output.choices
        for record in [choice.routed_experts]
    ]


@pytest.mark.parametrize("ledger", LEDGERS)
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_an_interrupt_at_any_call_leaves_an_engine_in_order_or_one_that_says_otherwise(
    steps_in_flight: int, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(
        SERVED["qwen3_moe"].build(),
        device="cpu",
        executor="inline",
        max_steps_in_flight=steps_in_flight,
        block_size=4,
        num_blocks=12,
        ledger=ledger,
    )
    counter = Interrupter(at=None)
    whole = contents(generate(llm, counter, monkeypatch))
    assert llm.engine.scheduler.num_preemptions > 0
    failed = 0
    for moment in range(MOMENTS):
        llm.engine.reset_prefix_cache()
        # The first run makes some calls that no later one makes.
        at = 1 + moment * counter.calls * 9 // 10 // MOMENTS
        with pytest.raises(KeyboardInterrupt):
            generate(llm, Interrupter(at), monkeypatch)
        llm.check_integrity()
        if llm.engine._failure is not None:
            failed += 1
            with pytest.raises(WorkerError, match="a step was interrupted"):
                llm.generate(PROMPTS, PARAMS)
            llm.restart()
        assert contents(llm.generate(PROMPTS, PARAMS)) == whole
        llm.check_integrity()
    # In the middle of a forward pass, which is where most calls are, the worker's state is lost.
    assert 0 < failed < MOMENTS


def held(calls: list[str], body: Callable[[], None]) -> None:
    with interrupts_held():
        body()
        calls.append("end of the block")


def test_held_interrupts_come_at_the_end_of_the_outermost_block() -> None:
    calls: list[str] = []

    def outer() -> None:
        held(calls, lambda: signal.raise_signal(signal.SIGINT))
        calls.append("after the inner block")

    with pytest.raises(KeyboardInterrupt):
        held(calls, outer)
    assert calls == ["end of the block", "after the inner block", "end of the block"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_nobody_handles_is_not_held() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        held([], lambda: signal.raise_signal(signal.SIGINT))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
