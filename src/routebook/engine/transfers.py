"""Between the host and the device, without anybody waiting.

A copy that is not from or to pinned memory makes the host wait for the device. Several small copies cost several
launches. So the arrays of a step go up in one pinned piece, and results come down on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16


def upload(device: torch.device, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
    """Bring arrays to the device in one copy, each with its own dtype and shape; on the CPU they are views."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    begins = np.cumsum([0, *(_padded(array.nbytes) for array in arrays)]).tolist()
    host = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=True)
    room = host.numpy()
    for array, begin in zip(arrays, begins, strict=False):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        room[begin : begin + len(flat)] = flat
    there = host.to(device, non_blocking=True)
    return [
        _part(there[begin : begin + array.nbytes], array)
        for array, begin in zip(arrays, begins, strict=False)
    ]


class OutputStream:
    """The one stream on which all results of a step leave the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def behind_the_step(self) -> Iterator[None]:
        """What is queued inside runs behind what the step has queued so far, and beside what follows."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """An event behind all that was queued; None on the CPU, where everything has run already."""
        return None if self._stream is None else self._stream.record_event()


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _part(piece: torch.Tensor, array: npt.NDArray[Any]) -> torch.Tensor:
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return piece.view(dtype).view(array.shape)
