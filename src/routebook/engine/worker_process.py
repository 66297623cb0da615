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

import torch
import zmq
from transformers.utils import logging

from routebook.engine.process_executor import NAME_VARIABLE
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
    RunStep,
    StageWeights,
    Start,
    Started,
    StepDone,
    Stop,
    ToWorker,
)
from routebook.engine.worker import Worker

_WATCH_S = 0.5


def main() -> None:
    """Answer the engine's messages until it says stop or is gone."""
    address, parent = sys.argv[1], int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    # An interrupt from the keyboard reaches both processes; what it means is the engine's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.ROUTING_ID, bytes.fromhex(os.environ.pop(NAME_VARIABLE)))
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        # Whoever listens at this port once the engine is gone is somebody else.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.connect(address)
        _serve(socket)


def _serve(socket: zmq.Socket[bytes]) -> None:
    decoding: Codec[ToWorker] = Codec(ToWorker)
    encoding: Codec[FromWorker] = Codec(FromWorker)
    socket.send_multipart(encoding.encode(Hello()))
    worker: Worker | None = None
    while True:
        frames = socket.recv_multipart(copy=False)
        message = decoding.decode([frame.buffer for frame in frames])
        if isinstance(message, Stop):
            break
        if isinstance(message, Drop):
            assert worker is not None, "the model was not loaded"
            worker.drop(message.request_ids)
            continue
        try:
            if isinstance(message, Start):
                worker = _load(message)
                answer: FromWorker = Started(worker.describe())
            else:
                assert worker is not None, "the model was not loaded"
                answer = _answer(worker, message)
        except Exception as error:  # noqa: BLE001 - the engine raises it on its side of the border
            answer = _failed(error)
        socket.send_multipart(encoding.encode(answer), copy=False)


def _load(start: Start) -> Worker:
    torch.set_num_threads(start.num_threads)
    if not start.progress_bars:
        logging.disable_progress_bar()
    return Worker(start.model, start.config)


def _answer(worker: Worker, message: ToWorker) -> FromWorker:
    match message:
        case RunStep(step):
            return StepDone(worker.execute(step))
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
