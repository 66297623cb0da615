"""vLLM 0.32: every kernel that is not monolithic has its experts chosen by a router object, on a CPU too."""

from __future__ import annotations

from typing import Any

from routebook.hosts.vllm.releases import Write
from routebook.hosts.vllm.releases.moe_runner import bind_router, moe_layers, uncapturable

__all__ = ["SPECULATION", "bind", "moe_layers"]

SPECULATION: tuple[str, ...] = ()


def bind(path: str, module: Any, write: Write) -> None:
    """Let a layer's router call `write` with its ids.

    Raises:
        UncapturableError: the layer's kernel chooses inside, and does not tell.
    """
    if not bind_router(module, write):
        raise uncapturable(path, module)
