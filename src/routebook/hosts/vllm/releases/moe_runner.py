"""What the releases have in common whose MoE layers are modules of the class `MoERunner`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from routebook.errors import UncapturableError
from routebook.hosts.vllm.releases import Write


def moe_layers(model: nn.Module) -> Iterator[tuple[str, int, Any]]:
    """Yield path, decoder layer and module of every MoE layer."""
    for path, module in model.named_modules():
        if isinstance(module, MoERunner):
            yield path, int(module.layer_id), module


def bind_router(module: Any, write: Write) -> bool:
    """Let a layer's router object call `write`; False if its kernel does not ask one."""
    if module.routed_experts.quant_method.is_monolithic or not isinstance(
        module.router, BaseRouter
    ):
        return False
    module.router.set_capture_fn(write)
    return True


def uncapturable(path: str, module: Any) -> UncapturableError:
    """The refusal of a layer whose kernel chooses inside."""
    kernel = type(module.routed_experts.quant_method).__name__
    return UncapturableError(
        f"{path}: the kernel of {kernel} chooses experts inside and does not tell which; use unquantized weights"
    )
