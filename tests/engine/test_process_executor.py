"""The worker in a process of its own: the same results across the border, and every way in which it can end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from routebook.engine import process_executor
from routebook.engine.engine import PauseMode
from routebook.engine.executor import LocalExecutor
from routebook.engine.llm import LLM
from routebook.engine.outputs import RequestOutput
from routebook.engine.process_executor import ProcessExecutor, _Child
from routebook.engine.request import FinishReason
from routebook.engine.sampling_params import SamplingParams
from routebook.engine.wire import Codec, Done, FromWorker
from routebook.errors import (
    IntegrityError,
    ModelError,
    ModelNotFoundError,
    WorkerDiedError,
    WorkerError,
)
from routebook.routes import Origin
from tests.families import SERVED

PROSE = "It is a truth universally acknowledged, that a single man in possession of a good fortune"
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "block_size": 4,
    "num_blocks": 26,
    "max_model_len": 100,
    "max_num_batched_tokens": 48,
}
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The bundled model in a process; every test leaves it idle, with its own weights."""
    llm = LLM("tiny", executor="process", **OPTIONS)
    yield llm
    llm.shutdown()


def inline(**config: Any) -> LLM:
    return LLM("tiny", executor="inline", **OPTIONS | config)


def set_depth(llm: LLM, steps_in_flight: int) -> None:
    config = llm.engine.config
    scheduler = replace(config.scheduler, max_steps_in_flight=steps_in_flight)
    llm.engine.config = replace(config, scheduler=scheduler)


def child_of(llm: LLM) -> _Child:
    assert isinstance(llm.engine.executor, ProcessExecutor)
    assert llm.engine.executor._child is not None
    return llm.engine.executor._child


def pid_of(llm: LLM) -> int:
    return child_of(llm).process.pid


def is_gone(pid: int) -> bool:
    """Whether no such process runs; one that is dead and was never its parent's care counts as gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def is_reaped(pid: int) -> bool:
    """Whether this process has no such child, dead or alive."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def contents(outputs: list[RequestOutput]) -> list[Any]:
    """All that a caller gets but the versions of weights, in comparable form."""
    return [
        (
            choice.text,
            choice.token_ids,
            choice.finish_reason,
            choice.logprobs,
            record and (record.ids_TLK.tolist(), str(record.ids_TLK.dtype)),
            record and [(s.start, s.stop, s.origin) for s in record.provenance],
            record and record.valid_T.tolist(),
        )
        for output in outputs
        for choice in output.choices
        for record in [choice.routed_experts]
    ]


def step_until_it_fails(llm: LLM) -> WorkerError:
    def run() -> None:
        while llm.engine.has_work:
            llm.engine.step()

    with pytest.raises(WorkerError) as raised:
        run()
    return raised.value


def noisy_weights() -> dict[str, torch.Tensor]:
    """Weights of the bundled model, disturbed so that tokens are routed differently; one is of another format."""
    executor = inline().engine.executor
    assert isinstance(executor, LocalExecutor)
    generator = torch.Generator().manual_seed(9)
    weights = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in executor.worker.loaded.model.state_dict().items()
    }
    return weights | {"model.norm.weight": weights["model.norm.weight"].bfloat16()}


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_results_are_those_of_the_same_thread(llm: LLM, steps_in_flight: int) -> None:
    prompts = [PROSE[:40], PROSE, PROSE[:60] + " it", "12+34=46\n17+25="]
    params = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2),
        SamplingParams(n=2, seed=5, max_tokens=40, top_p=0.9, logprobs=0, ignore_eos=True),
        SamplingParams(seed=6, max_tokens=25, routed_experts=False, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, stop="\n"),
    ]
    # Ctrl-C in a terminal reaches the worker as well.
    os.kill(pid_of(llm), signal.SIGINT)
    other = inline()
    results = []
    for each in (llm, other):
        set_depth(each, steps_in_flight)
        each.engine.reset_prefix_cache()
        num_preemptions = each.engine.scheduler.num_preemptions
        results.append(contents(each.generate(prompts, params) + each.generate(prompts, params)))
        assert each.engine.scheduler.num_preemptions > num_preemptions
        each.check_integrity()
    assert results[0] == results[1]
    origins = {origin for *_, spans, _ in results[0] for _, _, origin in spans or ()}
    assert Origin.PREFIX_CACHE in origins


def test_new_weights_cross_the_border(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tensors, by a folder and by a name, in the middle of a request."""
    weights = noisy_weights()
    other = inline()
    executor = other.engine.executor
    assert isinstance(executor, LocalExecutor)
    executor.stage_weights(weights)
    executor.commit_weights()
    executor.worker.loaded.model.save_pretrained(tmp_path / "new")
    monkeypatch.chdir(tmp_path)

    def switch(llm: LLM) -> list[Any]:
        set_depth(llm, 2)
        llm.engine.reset_prefix_cache()
        first = llm.engine.scheduler.weight_version
        outputs, fingerprints = [], []
        for source in (weights, "tiny", "./new", "tiny"):
            llm.engine.add_request(llm.engine.tokenize(PROSE[:40]), LONG)
            for _ in range(9):
                outputs += llm.engine.step()
            llm.update_weights(source, mode="keep")
            fingerprints.append(llm.fingerprint)
            while llm.engine.has_work:
                outputs += llm.engine.step()
        assert len({choice[1] for choice in contents(outputs)}) > 1
        versions = [
            [(s.start, s.weight_version - first) for s in record.provenance]
            for output in outputs
            if (record := output.choices[0].routed_experts)
        ]
        assert all(len({version for _, version in spans}) == 2 for spans in versions)
        return [contents(outputs), versions, fingerprints]

    assert switch(llm) == switch(inline())
    for wrong, words in [("./nowhere", "nowhere"), ({}, "hold no tensor")]:
        with pytest.raises(ModelError, match=words) as raised:
            llm.update_weights(wrong)
        assert isinstance(raised.value, ModelNotFoundError) == bool(wrong)
    llm.check_integrity()


def test_the_worker_recounts_too(llm: LLM) -> None:
    llm.engine.add_request([5, 6, 7], LONG)
    llm.engine.step()
    llm.engine.pause()
    with pytest.raises(IntegrityError, match="the idle worker holds 1 requests"):
        llm.engine.executor.check_idle()
    llm.engine.resume()
    while llm.engine.has_work:
        llm.engine.step()
    llm.check_integrity()


def test_nobody_else_can_speak_for_the_worker_or_end_it(llm: LLM) -> None:
    llm.engine.reset_prefix_cache()
    before = llm.generate(PROSE[:40], LONG)
    child = child_of(llm)
    # What a fork of this process does when it ends.
    process_executor._end(os.getpid() + 1, child.process, child._context)
    address = child._socket.getsockopt(zmq.LAST_ENDPOINT)
    frames: list[Any] = Codec[FromWorker](FromWorker).encode(Done())
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 1000)
        stranger.connect(address)
        stranger.send_multipart(frames)
        assert child._socket.poll(5000)
        llm.engine.reset_prefix_cache()
        assert contents(llm.generate(PROSE[:40], LONG)) == contents(before)


def test_an_interrupted_wait_loses_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    set_depth(llm, 2)
    llm.engine.reset_prefix_cache()
    before = llm.generate(PROSE[:40], LONG)
    llm.engine.reset_prefix_cache()
    llm.engine.add_request(llm.engine.tokenize(PROSE[:40]), LONG, PROSE[:40])
    llm.engine.step()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(child_of(llm), "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.engine.step()
    outputs: list[RequestOutput] = []
    while llm.engine.has_work:
        outputs += llm.engine.step()
    assert contents(outputs) == contents(before)


def test_a_restart_forgets_recurrent_states() -> None:
    llm = LLM(SERVED["qwen3_next"].build(), **OPTIONS)
    before = llm.generate([[7, 3, 11, 5]], LONG)
    llm.engine.add_request([7, 3, 11, 5], LONG)
    llm.engine.step()
    llm.engine.scheduler._dropped.append("nobody")
    step_until_it_fails(llm)
    llm.engine.step()
    llm.restart()
    llm.check_integrity()
    assert contents(llm.generate([[7, 3, 11, 5]], LONG)) == contents(before)


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_a_step_that_raises_is_told_and_the_engine_starts_again(
    request: pytest.FixtureRequest, executor: str
) -> None:
    if executor == "process":
        llm: LLM = request.getfixturevalue("llm")
    else:
        llm = LLM("tiny", executor=executor, **OPTIONS)
    set_depth(llm, 2)
    engine, original = llm.engine, llm.fingerprint
    llm.update_weights(noisy_weights())
    version, fingerprint = engine.scheduler.weight_version, llm.fingerprint
    before = llm.generate(PROSE[:40], LONG)
    ids = [engine.add_request(engine.tokenize(PROSE[:40]), LONG) for _ in range(2)]
    for _ in range(5):
        engine.step()
    # A step that speaks of a request which the worker does not know.
    engine.scheduler._dropped.append("nobody")
    error = step_until_it_fails(llm)
    assert not isinstance(error, WorkerDiedError)
    assert "a step failed in the worker: KeyError: 'nobody'" in str(error)
    if executor == "process":
        assert "input_batch.py" in str(error)
    else:
        assert isinstance(error.__cause__, KeyError)
    assert list(error.request_ids) == ids
    outputs = engine.step()
    assert [output.request_id for output in outputs] == ids
    check_ended_by(error, outputs, before[0])
    check_refusing(llm, error)
    # The worker of this process keeps its weights; a new process has those that it began with.
    assert llm.restart() == version + (executor == "process")
    assert llm.fingerprint == (original if executor == "process" else fingerprint)
    llm.update_weights(noisy_weights())
    assert contents(llm.generate(PROSE[:40], LONG)) == contents(before)
    llm.update_weights("tiny")
    llm.check_integrity()


def check_ended_by(
    error: WorkerError, outputs: list[RequestOutput], undisturbed: RequestOutput
) -> None:
    """What ended has the beginning of what it would have become, with every row."""
    for output in outputs:
        (choice,), (whole,) = output.choices, undisturbed.choices
        assert choice.finish_reason is FinishReason.ERROR
        assert choice.stop_reason == str(error)
        assert choice.token_ids == whole.token_ids[: len(choice.token_ids)]
        record, judge = choice.routed_experts, whole.routed_experts
        assert record is not None
        assert judge is not None
        assert record.complete
        assert record.num_rows == len(output.prompt_token_ids) + len(choice.token_ids) - 1
        np.testing.assert_array_equal(record.ids_TLK, judge.ids_TLK[: record.num_rows])


def check_refusing(llm: LLM, error: WorkerError) -> None:
    """A failed engine holds nothing and refuses everything with the words of its failure."""
    engine = llm.engine
    assert not engine.has_work
    llm.check_integrity()
    usage = engine.scheduler.ledger.usage()
    assert (usage.requests, usage.request_chunks) == (0, 0)
    for call in (
        engine.step,
        lambda: engine.add_request([5], LONG),
        lambda: llm.generate([[5]], LONG),
        lambda: llm.update_weights("tiny"),
    ):
        with pytest.raises(type(error)) as raised:
            call()
        assert str(raised.value) == str(error)
    engine.pause(PauseMode.WAIT)
    assert engine.abort("0") is None


def test_killing_the_worker_in_mid_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model whose rows are uint16."""
    folder, scratch = tmp_path / "model", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", None)
    family = SERVED["qwen3_moe"]
    replace(family, options=family.options | {"num_experts": 300}).build().save_pretrained(folder)
    options = {**OPTIONS, "max_steps_in_flight": 3, "num_blocks": 64}
    prompt = [7, 3, 11, 5, 19, 2, 23, 29]
    monkeypatch.chdir(tmp_path)
    llm = LLM("model", executor="process", **options)
    monkeypatch.chdir(scratch)
    (whole,) = llm.generate([prompt], LONG)
    assert contents([whole]) == contents(LLM(str(folder), **options).generate([prompt], LONG))
    record = whole.choices[0].routed_experts
    assert record is not None
    assert record.ids_TLK.dtype == np.uint16
    assert record.ids_TLK.max() > 255

    pid = pid_of(llm)
    ids = [llm.engine.add_request(prompt, LONG) for _ in range(3)]
    for _ in range(6):
        assert llm.engine.step() == []
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    error = step_until_it_fails(llm)
    assert time.monotonic() - killed < 2.0
    assert isinstance(error, WorkerDiedError)
    assert f"the worker process {pid} was ended by signal 9 (SIGKILL)" in str(error)
    assert list(error.request_ids) == ids
    outputs = llm.engine.step()
    assert [output.request_id for output in outputs] == ids
    assert all(len(output.choices[0].token_ids) >= 4 for output in outputs)
    check_ended_by(error, outputs, whole)
    check_refusing(llm, error)
    assert is_reaped(pid)
    assert is_gone(pid)

    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(WorkerDiedError, match="ended by itself with exit code 1"):
            llm.restart()
    check_refusing(llm, error)
    assert llm.restart() == 0
    assert contents(llm.generate([prompt], LONG)) == contents([whole])
    # Killed while nobody looks: the next request hears of it.
    os.kill(pid_of(llm), signal.SIGKILL)
    llm.engine.add_request(prompt, LONG)
    assert isinstance(step_until_it_fails(llm), WorkerDiedError)
    (output,) = llm.engine.step()
    assert output.choices[0].finish_reason is FinishReason.ERROR
    llm.shutdown()
    assert list(scratch.iterdir()) == []


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(
            FileNotFoundError
        ):  # a thread that ended meanwhile: its children are another thread's now
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def test_no_process_stays_when_a_start_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        assert len(children()) == len(before) + 1
        raise KeyboardInterrupt

    before = children()
    monkeypatch.setattr(_Child, "expect", interrupt)
    # As long as the exception lives, so does the executor.
    with pytest.raises(KeyboardInterrupt) as raised:
        LLM("tiny", executor="process")
    assert children() == before
    assert raised.tb is not None


def test_no_process_stays_that_nobody_knows_or_that_does_not_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = children()
    child = _Child(Path.cwd())
    assert len(children()) == len(before) + 1
    del child
    gc.collect()
    assert children() == before
    monkeypatch.setattr(process_executor, "_STOP_S", 0.1)
    child = _Child(Path.cwd())
    child.stop()
    assert child.process.returncode == -signal.SIGKILL
    assert children() == before


SCRIPT = """
import os, sys, time
from routebook import LLM, SamplingParams
llm = LLM("tiny", dtype="float32", executor="process", max_steps_in_flight=2)
llm.engine.add_request([5, 6, 7], SamplingParams(max_tokens=1000, ignore_eos=True))
llm.engine.step()
print(llm.engine.executor.pid, flush=True)
while True:
    llm.engine.step()
"""


def test_the_worker_ends_with_its_engine_s_process(tmp_path: Path) -> None:
    """Started from a script without a main guard, whose process is killed in the middle of a step."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        parent.kill()
    deadline = time.monotonic() + 10
    while not is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_gone(pid)


def test_shutdown_ends_the_process_and_may_be_called_twice(llm: LLM) -> None:
    """Keep this the last test of the worker that all share."""
    process = child_of(llm).process
    request_id = llm.engine.add_request([5, 6], LONG)
    llm.engine.step()
    llm.shutdown()
    llm.shutdown()
    assert process.returncode == 0
    assert is_reaped(process.pid)
    (output,) = llm.engine.step()
    assert (output.request_id, output.choices[0].finish_reason) == (request_id, FinishReason.ERROR)
    with pytest.raises(WorkerError, match=r"the engine was shut down; restart\(\) starts it again"):
        llm.generate([[5]], LONG)
