"""The worker's program for tests: it answers as late as it may, and on request takes all snapshots in one buffer.

A step is answered only when all steps that the engine may have in flight have run. That is what a slow network or a
busy engine does now and then.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from routebook.capture.buffer import CaptureBuffer
from routebook.capture.outputs import RoutedExpertsTensors
from routebook.engine import worker_process
from routebook.engine.wire import ToWorker
from routebook.engine.worker_process import WorkerService

ONE_BUFFER = "TESTS_ONE_SNAPSHOT_BUFFER"
"""Environment variable: set, all snapshots lie in one buffer."""
_PATIENCE_MS = 300
"""How long a further step is waited for: at the end of a run there is none."""


def take_snapshots_in_one_buffer(setattr_: Callable[[Any, str, Any], None]) -> None:
    """Remove the guard of the capture buffer: a snapshot is narrowed into memory that the next one takes too."""
    snapshot = CaptureBuffer.snapshot

    def shared(self: Any) -> RoutedExpertsTensors:
        ids_TLK = snapshot(self).ids_TLK
        room = torch.empty(self.max_tokens, *ids_TLK.shape[1:], dtype=ids_TLK.dtype)
        view_TLK = self.__dict__.setdefault("one_buffer", room)[: len(ids_TLK)]
        return RoutedExpertsTensors(view_TLK.copy_(ids_TLK))

    setattr_(CaptureBuffer, "snapshot", shared)


class LateService(WorkerService):
    """Answers the oldest step when there is no room for another one."""

    def _next(self) -> ToWorker:
        while self._running and (
            len(self._running) == self._max_steps_in_flight or not self._socket.poll(_PATIENCE_MS)
        ):
            self._answer_oldest()
        frames = self._socket.recv_multipart(copy=False)
        return self._decoding.decode([frame.buffer for frame in frames])


if __name__ == "__main__":
    if ONE_BUFFER in os.environ:
        take_snapshots_in_one_buffer(setattr)
    worker_process.WorkerService = LateService  # type: ignore[misc]
    worker_process.main()
