"""Messages between an engine and the process of its worker.

A message is a tagged msgpack struct, and every array or tensor in it is a frame of its own: sent from the memory where
it lies, and read from the memory where it arrived. In the struct stands only which frame it is, its dtype and shape.
Steps have a form of their own, see :mod:`routebook.engine.wire_delta`.

Nothing that a message holds is ever run or imported by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar, get_origin

import msgspec
import numpy as np
import torch

from routebook.engine.config import EngineConfig
from routebook.engine.served_model import ServedModel
from routebook.engine.wire_delta import ContinueStep, OtherOrder, RunStep, StepDone

Frame = bytes | memoryview


class Start(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Load a model; answered with `Started`. The first message to a new process."""

    model: str
    config: EngineConfig
    num_threads: int
    """Threads of torch, as in the engine's process: another number would change the order of sums."""
    progress_bars: bool


class Drop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget requests; not answered."""

    request_ids: list[str]


class CheckIdle(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Recount what an idle worker holds; answered with `Done`."""


class StageWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Read and check new weights; answered with `Done`."""

    source: str | dict[str, torch.Tensor]


class CommitWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Use the staged weights; answered with `Committed`."""


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End the process; not answered."""


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first message of a new process."""


class Started(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The model is loaded."""

    served: ServedModel


class Committed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The new weights are in use."""

    fingerprint: str


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """It is done, and there is nothing to tell."""


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """It failed."""

    kind: str
    """Name of the error's class, one of `routebook.errors` or another."""
    message: str
    trace: str
    """The worker's traceback."""


ToWorker = Start | RunStep | ContinueStep | Drop | CheckIdle | StageWeights | CommitWeights | Stop
FromWorker = Hello | Started | StepDone | OtherOrder | Committed | Done | Failed

M = TypeVar("M")


class Codec(Generic[M]):
    """Writes and reads the messages of one direction. Not for several threads at once.

    Args:
        kind: union of the messages.
    """

    def __init__(self, kind: Any) -> None:
        self._frames: list[Any] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._put)
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=self._take)

    def encode(self, message: M) -> list[Frame]:
        """The struct, then the arrays that it refers to: views of their own memory, not copies."""
        self._frames = []
        head = self._encoder.encode(message)
        frames, self._frames = self._frames, []
        return [head, *frames]

    def decode(self, frames: Sequence[Frame]) -> M:
        """The message; its arrays are views of `frames`.

        Raises:
            msgspec.ValidationError: the frames are not what this program's other half sends.
        """
        head, *self._frames = frames
        message: M = self._decoder.decode(head)
        self._frames = []
        return message

    def _put(self, value: Any) -> tuple[int, str, tuple[int, ...]]:
        """Called for what msgspec does not know: lay the value into the next frame."""
        if isinstance(value, torch.Tensor):
            dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
            # An empty tensor counts as contiguous whatever its strides are.
            flat = value.detach().to("cpu").contiguous().as_strided((value.numel(),), (1,))
            array = flat.view(torch.uint8).numpy()
        elif isinstance(value, np.ndarray):
            dtype, shape = value.dtype.str, value.shape
            array = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        else:
            raise NotImplementedError(f"{type(value).__name__} has no form in a message")
        self._frames.append(array.data)
        return len(self._frames), dtype, shape

    def _take(self, kind: Any, value: Any) -> Any:
        """Called for what msgspec does not know: the value that lies in a frame."""
        index, dtype, shape = value
        frame = self._frames[index - 1]
        if kind is torch.Tensor:
            flat = torch.from_numpy(np.ndarray(len(frame), np.uint8, buffer=frame))
            return flat.view(getattr(torch, dtype)).reshape(shape)
        assert get_origin(kind) is np.ndarray, f"a message holds a {kind}"
        return np.ndarray(shape, dtype, buffer=frame)
