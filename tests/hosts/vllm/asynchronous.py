"""Asynchronous scheduling on a CPU, where vLLM switches it off: there is no stream to overlap with.

What is left of it is what matters to rows: the next step is scheduled before the results of the one before are known.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


class _Event(_Stream):
    def record(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def force() -> None:
    """Let every engine of this process schedule asynchronously."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker import cpu_model_runner

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_stay_asynchronous(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_stay_asynchronous)
    torch.cuda.Event = _Event
    torch.cuda.Stream = _Stream
    torch.cuda.current_stream = lambda *args: _Stream()
    torch.cuda.stream = lambda stream: nullcontext()
    # vLLM puts placeholders of its own in place while it makes the runner, and takes them away again.
    cpu_model_runner._torch_cuda_wrapper = nullcontext
    torch.Event = _Event
