"""vLLM 0.32: every kernel that is not monolithic has its experts chosen by a router object, on a CPU too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from routebook.errors import UncapturableError
from routebook.hosts.vllm.releases import Write

SPECULATION: tuple[str, ...] = ()


def moe_layers(model: nn.Module) -> Iterator[tuple[str, int, Any]]:
    """Yield path, decoder layer and module of every MoE layer."""
    for path, module in model.named_modules():
        if isinstance(module, MoERunner):
            yield path, int(module.layer_id), module


def bind(path: str, module: Any, write: Write) -> None:
    """Let a layer's router call `write` with its ids.

    Raises:
        UncapturableError: the layer's kernel chooses inside, and does not tell.
    """
    method = module.routed_experts.quant_method
    if method.is_monolithic or not isinstance(module.router, BaseRouter):
        raise UncapturableError(
            f"{path}: the kernel of {type(method).__name__} chooses experts inside and does not tell"
            " which; use unquantized weights"
        )
    module.router.set_capture_fn(write)
