"""What megatron-core, which is written for GPUs, needs in order to run on a CPU over gloo.

Nothing here touches routing: devices, streams, random states, and two collectives that gloo has in a narrower form.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

FACTORIES = ("zeros", "empty", "tensor", "ones", "full")


class NoStream:
    """A stream, or an event, where there is no queue to order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


def patch(monkey: pytest.MonkeyPatch) -> None:
    """Make megatron-core run on the CPU until the monkeypatch is undone."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    _patch_cuda(monkey)
    _patch_factories(monkey)
    monkey.setattr(dist, "all_to_all_single", _whole_split_sizes(dist.all_to_all_single))
    monkey.setattr(random, "_get_cuda_rng_state", lambda *a, **k: torch.get_rng_state())
    monkey.setattr(random, "_set_cuda_rng_state", lambda state, *a, **k: torch.set_rng_state(state))
    monkey.setattr(moe_utils, "te_general_gemm", None, raising=False)


def _patch_cuda(monkey: pytest.MonkeyPatch) -> None:
    monkey.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkey.setattr(torch.cuda, "Stream", NoStream)
    monkey.setattr(torch.cuda, "Event", NoStream)
    monkey.setattr(torch.cuda, "current_stream", NoStream)
    monkey.setattr(torch.cuda, "default_stream", NoStream)
    monkey.setattr(torch.cuda, "stream", nullcontext)
    monkey.setattr(torch.cuda, "get_rng_state", lambda *a: torch.get_rng_state())
    monkey.setattr(torch.cuda, "set_rng_state", lambda state, *a: torch.set_rng_state(state))
    monkey.setattr(torch.cuda, "manual_seed", torch.manual_seed)
    monkey.setattr(torch.cuda, "synchronize", lambda *a: None)
    monkey.setattr(torch.Tensor, "record_stream", lambda *a: None)
    monkey.setattr(torch.Tensor, "cuda", lambda self, *a, **k: self)


def _patch_factories(monkey: pytest.MonkeyPatch) -> None:
    def on_cpu(make: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if "cuda" in str(kwargs.get("device")):
                kwargs["device"] = "cpu"
            return make(*args, **kwargs)

        return wrapped

    for name in FACTORIES:
        monkey.setattr(torch, name, on_cpu(getattr(torch, name)))


def _whole_split_sizes(original: Any) -> Any:
    def numbers(sizes: Any) -> Any:
        return None if sizes is None else [int(size) for size in sizes]

    def all_to_all_single(
        output: Any, input: Any, output_splits: Any = None, input_splits: Any = None, **kwargs: Any
    ) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if name in kwargs:
                kwargs[name] = numbers(kwargs[name])
        given = [numbers(sizes) for sizes in (output_splits, input_splits) if sizes is not None]
        return original(output, input, *given, **kwargs)

    return all_to_all_single


@contextmanager
def plain_norm() -> Any:
    """Torch's RMSNorm of the local layer spec, also under sequence parallelism."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        shared, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = shared
        for parameter in norm.parameters():
            parameter.sequence_parallel = shared
        return norm

    WrappedTorchNorm.__new__ = new
    try:
        yield
    finally:
        WrappedTorchNorm.__new__ = original
