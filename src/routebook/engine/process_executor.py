"""The executor whose worker is a process of its own.

Engine and worker talk over ZeroMQ on a TCP port of the loopback interface that the system picks: unlike a socket in a
folder, it leaves nothing behind, however either of them ends. Other users of the machine could connect to such a
port, so the worker is known by a secret name, which it gets in its environment; messages from others are dropped.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import weakref
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import zmq
from transformers.utils import logging

from routebook import errors
from routebook.engine.config import EngineConfig
from routebook.engine.executor import Executor
from routebook.engine.interrupts import interrupts_held
from routebook.engine.model_loader import resolve_model
from routebook.engine.served_model import ServedModel
from routebook.engine.step import ModelRunnerOutput, SchedulerOutput
from routebook.engine.weights import Weights
from routebook.engine.wire import (
    CheckIdle,
    Codec,
    Committed,
    CommitWeights,
    Done,
    Drop,
    Failed,
    FromWorker,
    Hello,
    StageWeights,
    Start,
    Started,
    Stop,
    ToWorker,
)
from routebook.engine.wire_delta import OtherOrder, PlanWriter, StepDone, read_output
from routebook.errors import ConfigError, RoutebookError, WorkerDiedError, WorkerError

NAME_VARIABLE = "ROUTEBOOK_WORKER_NAME"
"""Environment variable with the worker's secret name, in hexadecimal digits."""

_PROGRAM = "routebook.engine.worker_process"
_POLL_MS = 100
"""How often the process is looked at while an answer is waited for."""
_STOP_S = 5.0
"""How long the process may take to end by itself."""

R = TypeVar("R", bound=FromWorker)


class ProcessExecutor(Executor):
    """Runs the worker in a child process, which loads the model itself.

    The child ends when it is told to, when the executor is garbage, and when this process ends in whatever way.

    Args:
        model: a folder, a hub id, or a bundled name.
        config: options of the engine's components.

    Raises:
        ConfigError: the model is in memory, where another process cannot take it from.
    """

    def __init__(self, model: str | Any, config: EngineConfig) -> None:
        if not isinstance(model, str):
            raise ConfigError(
                f"executor='process' loads the model in another process, which cannot take a"
                f" {type(model).__name__} from this one's memory; give its folder or its name, or use"
                " executor='inline' or 'thread'"
            )
        self._model = model
        self._config = config
        self._folder = Path.cwd()
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        """The worker's process id, None when there is none."""
        return None if self._child is None else self._child.process.pid

    def start(self) -> ServedModel:
        """Start a process and load the model in it. A process that is there is stopped before."""
        self.shutdown()
        try:
            with interrupts_held():
                self._child = _Child(self._folder)
            self._child.expect(Hello).result()
            start = Start(
                self._model,
                self._config,
                torch.get_num_threads(),
                logging.is_progress_bar_enabled(),
            )
            return self._child.ask(start, Started).result().served
        except BaseException:
            # It may be loading for minutes, and would hear of nothing meanwhile.
            if self._child is not None:
                self._child.kill()
            self._child = None
            raise

    def submit(self, step: SchedulerOutput) -> _StepAnswer:
        """Send the step; its error is raised by the result."""
        return self._running().run(step)

    def drop(self, request_ids: list[str]) -> None:
        """Tell the worker; nothing is waited for."""
        self._running().tell(Drop(request_ids))

    def check_idle(self) -> None:
        """See :meth:`Executor.check_idle`."""
        self._running().ask(CheckIdle(), Done).result()

    def stage_weights(self, source: str | Weights) -> None:
        """See :meth:`Executor.stage_weights`. Tensors go to the worker as they lie in memory."""
        if isinstance(source, str):
            # The worker stays in the folder where it was started.
            path = Path(resolve_model(source))
            message = StageWeights(str(path.absolute()) if path.exists() else source)
        else:
            message = StageWeights(dict(source))
        self._running().ask(message, Done).result()

    def commit_weights(self) -> str:
        """See :meth:`Executor.commit_weights`."""
        return self._running().ask(CommitWeights(), Committed).result().fingerprint

    def shutdown(self) -> None:
        """Stop the process; one that does not end within some seconds is killed."""
        if self._child is not None:
            self._child.stop()
            self._child = None

    def _running(self) -> _Child:
        assert self._child is not None, "the worker was not started"
        return self._child


class _Child:
    """The process and the socket to it. Answers come in the order of the questions."""

    def __init__(self, folder: Path) -> None:
        # A name that begins with a zero byte would be one of ZeroMQ's own.
        self._name = b"w" + secrets.token_bytes(16)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._encoding: Codec[ToWorker] = Codec(ToWorker)
        self._decoding: Codec[FromWorker] = Codec(FromWorker)
        self._plans = PlanWriter()
        self._open: deque[_Answer[Any]] = deque()
        self.process = _spawn(f"tcp://127.0.0.1:{port}", self._name, folder)
        self._end = weakref.finalize(self, _end, os.getpid(), self.process, self._context)

    def tell(self, message: ToWorker) -> None:
        """Send a message that has no answer."""
        frames = self._encoding.encode(message)
        self._socket.send_multipart([self._name, *frames], copy=False)

    def ask(self, message: ToWorker, kind: type[R]) -> _Answer[R]:
        """Send a message that is answered with a `kind`."""
        self.tell(message)
        return self.expect(kind)

    def run(self, step: SchedulerOutput) -> _StepAnswer:
        """Send a step."""
        self.tell(self._plans.write(step))
        answer: _Answer[StepDone | OtherOrder] = self.expect(StepDone, OtherOrder)
        return _StepAnswer(answer, self._plans.number, step)

    def expect(self, *kinds: type[R]) -> _Answer[R]:
        """An answer of one of these kinds, which comes after all those expected before."""
        answer = _Answer(self, kinds)
        self._open.append(answer)
        return answer

    def receive(self) -> None:
        """Wait for the next message and give it to the oldest open answer.

        Raises:
            WorkerDiedError: the process has ended, and all its messages have been taken.
        """
        while not self._socket.poll(_POLL_MS):
            # What it sent before it ended may still be on its way from one thread to the other.
            if self.process.poll() is not None and not self._socket.poll(_POLL_MS):
                raise WorkerDiedError(
                    f"the worker process {self.process.pid} {_ending(self.process.returncode)}"
                )
        name, *frames = self._socket.recv_multipart(copy=False)
        if name.bytes == self._name:
            self._open.popleft().message = self._decoding.decode([f.buffer for f in frames])

    def stop(self) -> None:
        """Ask the process to end, and see to it that it does."""
        if self.process.poll() is None:
            self.tell(Stop())
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_S)
        self.kill()

    def kill(self) -> None:
        """End the process, if it still runs, and the socket to it."""
        self._end()


class _Answer(Generic[R]):
    """An answer of the worker, once it is there."""

    def __init__(self, child: _Child, kinds: tuple[type[R], ...]) -> None:
        self.message: FromWorker | None = None
        self._child = child
        self._kinds = kinds

    def result(self) -> R:
        """Wait for the answer.

        Raises:
            WorkerError: the worker failed or ended.
            RoutebookError: what the worker refused, as its own kind of error.
        """
        while self.message is None:
            self._child.receive()
        if isinstance(self.message, Failed):
            raise _error(self.message)
        assert isinstance(self.message, self._kinds), f"{self.message} is no answer here"
        return self.message


class _StepAnswer:
    """Results of a step, once they are there."""

    def __init__(
        self, answer: _Answer[StepDone | OtherOrder], number: int, step: SchedulerOutput
    ) -> None:
        self._answer = answer
        self._number = number
        self._step = step

    def result(self) -> ModelRunnerOutput:
        """Wait for the step; see :meth:`StepResult.result`."""
        return read_output(self._number, self._step, self._answer.result())


def _spawn(address: str, name: bytes, folder: Path) -> subprocess.Popen[bytes]:
    """Start the worker as a program, so that no code of the caller's script runs in it."""
    variables = {NAME_VARIABLE: name.hex(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _PROGRAM, address, str(os.getpid())],
        env=os.environ | variables,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        # An interrupt from the keyboard goes to all processes of a session, also to one that still starts.
        start_new_session=True,
    )


def _end(owner: int, process: subprocess.Popen[bytes], context: zmq.Context[Any]) -> None:
    """Leave no process behind; a fork of the owner has no say in it."""
    if os.getpid() != owner:
        return
    if process.poll() is None:
        process.kill()
    process.wait()
    context.destroy(linger=0)


def _ending(returncode: int) -> str:
    """How the process ended."""
    if returncode >= 0:
        return f"ended by itself with exit code {returncode}"
    return f"was ended by signal {-returncode} ({signal.Signals(-returncode).name})"


def _error(failed: Failed) -> RoutebookError:
    """The worker's error, to be raised here."""
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, RoutebookError) and kind is not WorkerError:
        return kind(failed.message)
    return WorkerError(f"{failed.message}\n\nThe worker's own traceback:\n{failed.trace}")
