"""The program that runs a worker for an engine in another process.

`python -m routebook.engine.worker_process ADDRESS PID`, started by :mod:`routebook.engine.process_executor` with its
secret name in the environment; PID is the engine's process, without which it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections import deque

import torch
import zmq
from transformers.utils import logging

from routebook.engine.process_executor import NAME_VARIABLE
from routebook.engine.step import SchedulerOutput
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
from routebook.engine.wire_delta import ContinueStep, PlanReader, RunStep, write_output
from routebook.engine.worker import LaunchedStep, Worker

_WATCH_S = 0.5
_POLL_MS = 1
"""How long a message is waited for before the device is asked again whether a step has ended."""


def main() -> None:
    """Answer the engine's messages until it says stop or is gone."""
    address, parent = sys.argv[1], int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    # Whoever interrupts programs by their name reaches both processes; what it means is the engine's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.ROUTING_ID, bytes.fromhex(os.environ.pop(NAME_VARIABLE)))
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        # Whoever listens at this port once the engine is gone is somebody else.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.connect(address)
        WorkerService(socket).serve()


class WorkerService:
    """A worker and the engine's messages to it, answered in the order in which they came.

    As many steps as the engine may have in flight are given to the device before the first one's results are waited
    for, so that the device need not wait for the next step.

    Args:
        socket: to the engine.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._decoding: Codec[ToWorker] = Codec(ToWorker)
        self._encoding: Codec[FromWorker] = Codec(FromWorker)
        self._worker: Worker | None = None
        self._max_steps_in_flight = 1
        self._plans = PlanReader()
        self._running: deque[tuple[int, SchedulerOutput, LaunchedStep]] = deque()
        """(number, plan, step), not answered yet."""

    def serve(self) -> None:
        """Say hello, then serve until told to stop."""
        self._send(Hello())
        while not isinstance(message := self._next(), Stop):
            try:
                self._take(message)
            except Exception as error:  # noqa: BLE001 - the engine raises it on its side of the border
                self._answer_running()
                self._send(_failed(error))

    def _next(self) -> ToWorker:
        """The next message; steps that have ended before it comes are answered meanwhile."""
        while self._running:
            _, _, oldest = self._running[0]
            if oldest.is_done or len(self._running) == self._max_steps_in_flight:
                self._answer_oldest()
            elif self._socket.poll(_POLL_MS):
                break
        frames = self._socket.recv_multipart(copy=False)
        return self._decoding.decode([frame.buffer for frame in frames])

    def _take(self, message: ToWorker) -> None:
        if isinstance(message, Start):
            self._load(message)
            return
        worker = self._worker
        assert worker is not None, "the model was not loaded"
        if isinstance(message, RunStep | ContinueStep):
            plan = self._plans.read(message)
            self._running.append((self._plans.number, plan, worker.launch(plan)))
            return
        self._answer_running()
        if isinstance(message, Drop):
            worker.drop(message.request_ids)
        else:
            self._send(_answer(worker, message))

    def _load(self, start: Start) -> None:
        torch.set_num_threads(start.num_threads)
        if not start.progress_bars:
            logging.disable_progress_bar()
        self._max_steps_in_flight = start.config.scheduler.max_steps_in_flight
        self._worker = Worker(start.model, start.config)
        self._send(Started(self._worker.describe()))

    def _answer_running(self) -> None:
        while self._running:
            self._answer_oldest()

    def _answer_oldest(self) -> None:
        number, plan, step = self._running.popleft()
        try:
            answer: FromWorker = write_output(number, plan, step.result())
        except Exception as error:  # noqa: BLE001 - as in `serve`
            answer = _failed(error)
        self._send(answer)

    def _send(self, answer: FromWorker) -> None:
        self._socket.send_multipart(self._encoding.encode(answer), copy=False)


def _answer(worker: Worker, message: ToWorker) -> FromWorker:
    match message:
        case StageWeights(source):
            worker.stage_weights(source)
        case CommitWeights():
            return Committed(worker.commit_weights())
        case CheckIdle():
            worker.check_idle()
        case _:
            raise AssertionError(f"no message for a worker that serves: {message}")
    return Done()


def _failed(error: Exception) -> Failed:
    cause = error.__cause__ or error
    return Failed(
        kind=type(error).__name__,
        message=str(error),
        trace="".join(traceback.format_exception(cause)),
    )


def _end_with(parent: int) -> None:
    """End this process, in the middle of whatever it does, once its parent is gone."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(0)


if __name__ == "__main__":
    main()
