"""Steps across the border: what arrives is what was meant, a steady step is small, and what does not fit is refused."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from routebook.capture.outputs import RoutedExpertsLists
from routebook.engine.config import LEDGERS
from routebook.engine.step import ModelRunnerOutput, SchedulerOutput, SideOutputs
from routebook.engine.wire import Codec, FromWorker, ToWorker
from routebook.engine.wire_delta import (
    ContinueStep,
    OtherOrder,
    PlanReader,
    PlanWriter,
    RunStep,
    StepDone,
    read_output,
    write_output,
)
from routebook.errors import WorkerError
from tests.engine.tagged import TaggedRunner, TaggedSystem


def nbytes_on_the_wire(frames: list[Any]) -> int:
    """ZMTP 3: two bytes before a frame of up to 255 bytes, nine before a longer one."""
    return sum(len(frame) + (2 if len(frame) < 256 else 9) for frame in frames)


def assert_same(arrived: Any, sent: Any) -> None:
    """Equal all the way down, types and the order of dicts included."""
    assert type(arrived) is type(sent)
    if is_dataclass(sent):
        for field in fields(sent):
            assert_same(getattr(arrived, field.name), getattr(sent, field.name))
    elif isinstance(sent, np.ndarray):
        assert arrived.dtype == sent.dtype
        np.testing.assert_array_equal(arrived, sent)
    elif isinstance(sent, list | tuple):
        for one, other in zip(arrived, sent, strict=True):
            assert_same(one, other)
    elif isinstance(sent, dict):
        assert_same(list(arrived.items()), list(sent.items()))
    else:
        assert arrived == sent


class Border:
    """Stands between a scheduler and a runner: every step and its results cross as bytes."""

    def __init__(self, runner: TaggedRunner) -> None:
        self._execute = runner.execute
        self.to_worker: Codec[ToWorker] = Codec(ToWorker)
        self.from_worker: Codec[FromWorker] = Codec(FromWorker)
        self.writer, self.reader = PlanWriter(), PlanReader()
        self.kinds: list[tuple[type, type]] = []

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        told = self.writer.write(step)
        heard = self.to_worker.decode(self.to_worker.encode(told))
        assert isinstance(heard, RunStep | ContinueStep)
        plan = self.reader.read(heard)
        assert_same(plan, step)
        output = self._execute(plan)
        answer = write_output(self.reader.number, plan, output)
        back = self.from_worker.decode(self.from_worker.encode(answer))
        assert isinstance(back, StepDone | OtherOrder)
        self.kinds.append((type(told), type(back)))
        arrived = read_output(self.writer.number, step, back)
        assert_same(arrived, output)
        return arrived


def system_with_border(**config: Any) -> tuple[TaggedSystem, Border]:
    system = TaggedSystem(**config)
    border = Border(system.runner)
    system.runner.execute = border.execute  # type: ignore[method-assign]
    return system, border


@pytest.mark.parametrize("ledger", LEDGERS)
@pytest.mark.parametrize("steps_in_flight", [1, 3])
@pytest.mark.parametrize(("block_size", "budget"), [(1, 64), (4, 7), (16, 64)])
@pytest.mark.parametrize("shuffled", [False, True])
def test_every_step_of_a_crowded_engine_arrives(
    block_size: int, budget: int, steps_in_flight: int, ledger: str, shuffled: bool
) -> None:
    """Starvation, shared prefixes, chunks, ends and aborts; in the plan's order, and in another one."""
    system, border = system_with_border(
        num_blocks=80 // block_size,
        block_size=block_size,
        budget=budget,
        steps_in_flight=steps_in_flight,
        ledger=ledger,
    )
    if not shuffled:
        system.runner.shuffle.shuffle = lambda order: None  # type: ignore[method-assign,assignment]
    prefix = [1 + i % 16 for i in range(33)]
    for n in range(16):
        request = system.add(prefix[: 12 + n], max_tokens=5 + 3 * n, ignore_eos=True)
        system.step()
        if n % 5 == 4:
            system.abort(request)
    system.run()
    system.scheduler.check_integrity()
    assert system.rows_compared > 300
    assert system.scheduler.num_preemptions > 0
    told = [kind for kind, _ in border.kinds]
    assert told.count(ContinueStep) > 0.9 * len(told)
    answers = {kind for _, kind in border.kinds}
    assert answers == ({StepDone, OtherOrder} if shuffled else {StepDone})


def decode_step(number: int, requests: int, new_blocks: dict[str, list[int]]) -> SchedulerOutput:
    ids = [f"{1000 + r}.0" for r in range(requests)]
    return SchedulerOutput(
        num_scheduled_tokens=dict.fromkeys(ids, 1),
        num_computed_tokens={i: 700 + 13 * r + number for r, i in enumerate(ids)},
        runs=dict.fromkeys(ids, 0),
        weight_version=70_000,
        new_block_ids=new_blocks,
        capture=True,
    )


def result_of(step: SchedulerOutput) -> ModelRunnerOutput:
    """As a model of Qwen3-30B-A3B's routing shape and vocabulary would answer."""
    ids = list(step.num_scheduled_tokens)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 128, (len(ids), 48, 8)).astype(np.uint8)
    return ModelRunnerOutput(
        request_ids=ids,
        starts_R=np.array(list(step.num_computed_tokens.values())),
        counts_R=np.ones(len(ids), np.int64),
        sampled_token_ids={i: 151_000 + r for r, i in enumerate(ids)},
        logprobs={},
        side=SideOutputs(routed_experts=RoutedExpertsLists(rows)),
    )


def test_a_steady_step_of_32_requests_carries_less_than_two_percent_beside_its_rows() -> None:
    """Both directions, framing included; every 16th step each request gets a block, on average two in a step."""
    to_worker: Codec[ToWorker] = Codec(ToWorker)
    from_worker: Codec[FromWorker] = Codec(FromWorker)
    writer, reader = PlanWriter(), PlanReader()
    nbytes = []
    for number in range(17):
        blocks = {f"{1000 + r}.0": [100_000 + r] for r in (number, number + 15)} if number else {}
        step = decode_step(number, 32, blocks)
        told = to_worker.encode(writer.write(step))
        message = to_worker.decode(told)
        assert isinstance(message, RunStep | ContinueStep)
        plan = reader.read(message)
        answer = from_worker.encode(write_output(reader.number, plan, result_of(plan)))
        nbytes.append(nbytes_on_the_wire(told) + nbytes_on_the_wire(answer))
    rows = 32 * 48 * 8
    assert max(nbytes[1:]) < 1.02 * rows
    # The first is spelled out.
    assert nbytes[0] > 1.02 * rows


def test_a_message_that_was_lost_or_came_twice_is_refused() -> None:
    writer, reader = PlanWriter(), PlanReader()
    messages = [writer.write(decode_step(number, 4, {})) for number in range(4)]
    assert [type(m) for m in messages] == [RunStep] + 3 * [ContinueStep]
    assert_same(reader.read(messages[0]), decode_step(0, 4, {}))
    with pytest.raises(WorkerError, match="step 2 is not the one that the engine planned"):
        reader.read(messages[2])
    reader = PlanReader()
    reader.read(messages[0])
    reader.read(messages[1])
    with pytest.raises(WorkerError, match="step 3 is not the one that the engine planned"):
        reader.read(messages[1])
    # Also one that is spelled out, and so needs no step before it.
    with pytest.raises(WorkerError, match="step 4 is not the one that the engine planned"):
        reader.read(messages[0])
    with pytest.raises(WorkerError, match="step 1 goes on from a step that never came"):
        PlanReader().read(messages[1])


@pytest.mark.parametrize(
    "change",
    [
        {"gone": [1]},
        {"added": {"7.0": (0, 5, 0)}},
        {"counts": {2: 3}},
        {"new_block_ids": {1: [7]}},
        {"new_block_ids": {9: [7]}},
        {"weight_version": 1},
        {"capture": False},
        {"dropped_request_ids": ["1000.0"]},
        {"gone": [0, 1], "added": {"1000.0": (701, 1, 0), "1001.0": (714, 1, 0)}},
    ],
)
def test_a_plan_that_arrives_otherwise_is_refused(change: dict[str, Any]) -> None:
    """The last case has the same requests in another order."""
    writer, reader = PlanWriter(), PlanReader()
    reader.read(writer.write(decode_step(0, 4, {})))
    message = writer.write(decode_step(1, 4, {"1001.0": [8]}))
    assert isinstance(message, ContinueStep)
    changed = ContinueStep(**{f: getattr(message, f) for f in message.__struct_fields__} | change)
    with pytest.raises(WorkerError, match="not the one that the engine planned"):
        reader.read(changed)


def test_a_batch_that_is_not_the_plan_s_is_refused_or_spelled_out() -> None:
    step = decode_step(0, 4, {})
    output = result_of(step)
    message = write_output(5, step, output)
    assert isinstance(message, StepDone)
    assert read_output(5, step, message).sampled_token_ids == output.sampled_token_ids
    third = np.array([0, 0, 1, 0])
    # What the worker says is what it laid out, not what it was told.
    for wrong in (
        replace(output, starts_R=output.starts_R + third),
        replace(output, counts_R=output.counts_R + third),
    ):
        with pytest.raises(WorkerError, match="ran another batch in step 5"):
            read_output(5, step, write_output(5, step, wrong))
    with pytest.raises(WorkerError, match="ran another batch in step 6"):
        read_output(6, step, message)
    with pytest.raises(WorkerError, match="sampled 3 tokens for 4 requests in step 5"):
        read_output(5, step, StepDone(message.digest, message.sampled[:-4], [], {}, message.side))
    # The digest of the plan does not pass for that of the batch.
    told = PlanWriter()
    told.number = 4
    echo = StepDone(told.write(step).digest, message.sampled, [], {}, message.side)
    with pytest.raises(WorkerError, match="ran another batch in step 5"):
        read_output(5, step, echo)

    for other in (
        replace(output, request_ids=output.request_ids[::-1], starts_R=output.starts_R[::-1]),
        replace(output, request_ids=[*output.request_ids[:3], "9.0"]),
        replace(output, sampled_token_ids=dict(reversed(output.sampled_token_ids.items()))),
        replace(output, sampled_token_ids={"9.0": 4}),
    ):
        message = write_output(5, step, other)
        assert isinstance(message, OtherOrder)
        assert_same(read_output(5, step, message), other)


def test_requests_without_a_next_token_are_told() -> None:
    step = decode_step(0, 4, {})
    output = result_of(step)
    for without in (["1000.0", "1002.0"], list(output.sampled_token_ids)):
        kept = {i: t for i, t in output.sampled_token_ids.items() if i not in without}
        message = write_output(1, step, replace(output, sampled_token_ids=kept))
        assert isinstance(message, StepDone)
        assert read_output(1, step, message).sampled_token_ids == kept
