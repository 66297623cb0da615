"""The worker's side of the border: steps are launched ahead of results, and answered in the order of their coming."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from routebook.engine import worker_process
from routebook.engine.config import EngineConfig
from routebook.engine.served_model import ServedModel
from routebook.engine.step import ModelRunnerOutput, SchedulerOutput
from routebook.engine.wire import CheckIdle, Codec, Drop, FromWorker, Start, Stop, ToWorker
from routebook.engine.wire_delta import PlanWriter, StepDone, read_output
from routebook.engine.worker_process import WorkerService
from routebook.errors import WorkerError
from routebook.routes import RouteSchema
from tests.engine.test_wire_delta import decode_step, result_of


class Frame:
    def __init__(self, data: bytes) -> None:
        self.buffer = data


class Engine:
    """Stands in for the socket: an engine with some steps in flight, which notes the answers."""

    def __init__(self, events: list[str], steps_in_flight: int) -> None:
        self._events = events
        self._encoding: Codec[ToWorker] = Codec(ToWorker)
        self._decoding: Codec[FromWorker] = Codec(FromWorker)
        self.answers: list[FromWorker] = []
        self._to_send: deque[list[Any]] = deque()
        self._after_answers: dict[int, list[list[Any]]] = {}
        config = EngineConfig.from_options(max_steps_in_flight=steps_in_flight)
        self.send(Start("model", config, 1, progress_bars=False))

    def send(self, message: ToWorker, *, after_answers: int = 0) -> None:
        """Send a message once that many answers have come."""
        frames = [bytes(frame) for frame in self._encoding.encode(message)]
        self._after_answers.setdefault(after_answers, []).append(frames)

    def poll(self, timeout: int) -> bool:
        self._release()
        return bool(self._to_send)

    def recv_multipart(self, copy: bool) -> list[Frame]:
        self._release()
        assert self._to_send, "the worker waits for a message, and the engine for an answer"
        return [Frame(data) for data in self._to_send.popleft()]

    def send_multipart(self, frames: list[Any], copy: bool) -> None:
        self.answers.append(self._decoding.decode([bytes(frame) for frame in frames]))
        self._events.append(type(self.answers[-1]).__name__)

    def _release(self) -> None:
        for count in sorted(self._after_answers):
            if count <= len(self.answers):
                self._to_send += self._after_answers.pop(count)


class Device:
    """Stands in for the worker: a device that runs one step after the other, which end when they are waited for."""

    def __init__(self, events: list[str], *, is_done: bool, broken: tuple[int, ...] = ()) -> None:
        self._events = events
        self._is_done = is_done
        self._broken = broken
        self._launched = 0

    def launch(self, step: SchedulerOutput) -> Any:
        self._launched += 1
        self._events.append(f"launch {self._launched}")
        if self._launched in self._broken:
            raise WorkerError(f"step {self._launched} broke")
        return Launched(self._events, self._launched, step, self._is_done)

    def drop(self, request_ids: list[str]) -> None:
        self._events.append("drop")

    def check_idle(self) -> None:
        self._events.append("recount")

    def describe(self) -> Any:
        return ServedModel(
            name="fake",
            fingerprint="0",
            dtype="float32",
            schema=RouteSchema(layer_ids=(0,), num_experts=4, top_k=1, num_hidden_layers=1),
            vocab_size=4,
            eos_token_ids=frozenset(),
            is_recurrent=False,
            unforcible=None,
            max_model_len=10,
            num_blocks=10,
        )


class Launched:
    def __init__(self, events: list[str], number: int, step: SchedulerOutput, done: bool) -> None:
        self._events = events
        self._number = number
        self._step = step
        self.is_done = done

    def result(self) -> ModelRunnerOutput:
        self._events.append(f"result {self._number}")
        return result_of(self._step)


def serve(
    monkeypatch: pytest.MonkeyPatch, *, steps_in_flight: int, num_steps: int, **device: Any
) -> tuple[list[str], list[FromWorker], list[SchedulerOutput]]:
    """An engine that keeps its steps in flight, then recounts and stops."""
    events: list[str] = []
    engine, writer = Engine(events, steps_in_flight), PlanWriter()
    plans = [decode_step(number, 3, {}) for number in range(num_steps)]
    monkeypatch.setattr(worker_process, "Worker", lambda *_: Device(events, **device))
    for number, plan in enumerate(plans):
        # Two answers come before any step's: hello, and that the model is loaded.
        answered = max(0, number - steps_in_flight + 1)
        engine.send(writer.write(plan), after_answers=2 + answered)
    engine.send(Drop(["1000.0"]), after_answers=2 + num_steps - steps_in_flight + 1)
    engine.send(CheckIdle(), after_answers=2 + num_steps - steps_in_flight + 1)
    engine.send(Stop(), after_answers=3 + num_steps)
    WorkerService(engine).serve()  # type: ignore[arg-type]
    assert [type(a).__name__ for a in engine.answers[:2]] == ["Hello", "Started"]
    return events[2:], engine.answers[2:], plans


def test_a_device_gets_the_next_step_before_the_last_one_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events, answers, plans = serve(monkeypatch, steps_in_flight=2, num_steps=4, is_done=False)
    order = "launch 1, launch 2, result 1, launch 3, result 2, launch 4, result 3, result 4"
    seen = [event for event in events if event != "StepDone"]
    assert seen == [*order.split(", "), "drop", "recount", "Done"]
    for number, (answer, plan) in enumerate(zip(answers, plans, strict=False), 1):
        assert isinstance(answer, StepDone)
        assert read_output(number, plan, answer).request_ids == list(plan.num_scheduled_tokens)


@pytest.mark.parametrize(("steps_in_flight", "is_done"), [(1, False), (3, True)])
def test_a_step_that_has_ended_is_answered_at_once(
    monkeypatch: pytest.MonkeyPatch, steps_in_flight: int, is_done: bool
) -> None:
    """On the CPU every step has ended when it was launched."""
    events, _, _ = serve(monkeypatch, steps_in_flight=steps_in_flight, num_steps=3, is_done=is_done)
    each = [[f"launch {n}", f"result {n}", "StepDone"] for n in (1, 2, 3)]
    assert events == [*each[0], *each[1], *each[2], "drop", "recount", "Done"]


def test_a_step_that_breaks_is_told_behind_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    events, _, _ = serve(monkeypatch, steps_in_flight=2, num_steps=3, is_done=False, broken=(2,))
    assert events[:5] == ["launch 1", "launch 2", "result 1", "StepDone", "Failed"]
