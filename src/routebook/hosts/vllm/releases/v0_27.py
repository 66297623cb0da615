"""vLLM 0.27: experts of a CPU are chosen by a function of a module, those of other kernels by a router object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.model_executor.layers.fused_moe import cpu_fused_moe

from routebook.hosts.vllm.releases import Write
from routebook.hosts.vllm.releases.moe_runner import bind_router, moe_layers, uncapturable

__all__ = ["SPECULATION", "bind", "moe_layers"]

SPECULATION: tuple[str, ...] = ("ngram",)


class _Running:
    """The layer whose kernel runs now: the function that chooses is the same for all of them."""

    write: Write | None = None


def bind(path: str, module: Any, write: Write) -> None:
    """Let a layer's router call `write` with its ids.

    Raises:
        UncapturableError: the layer's kernel chooses inside, and does not tell.
    """
    if bind_router(module, write):
        return
    method = module.routed_experts.quant_method
    kernel = getattr(method, "cpu_fused_moe", None)
    if kernel is None:
        raise uncapturable(path, module)
    _tell_choices()
    # A kernel that was bound before, and was not made anew since.
    method.cpu_fused_moe = _telling(getattr(kernel, "told_kernel", kernel), write)


def _telling(kernel: Callable[..., Any], write: Write) -> Callable[..., Any]:
    """The kernel of one layer, which says whose choice is made while it runs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        _Running.write = write
        output = kernel(*args, **kwargs)
        _Running.write = None
        return output

    run.told_kernel = kernel  # type: ignore[attr-defined]
    return run


def _tell_choices() -> None:
    """Replace the function that chooses by one that tells. A second call does nothing."""
    choose = cpu_fused_moe.select_experts
    if getattr(choose, "tells", False):
        return

    def select_experts(*args: Any, **kwargs: Any) -> Any:
        weights, ids = choose(*args, **kwargs)
        if _Running.write is not None:
            _Running.write(ids)
        return weights, ids

    select_experts.tells = True  # type: ignore[attr-defined]
    cpu_fused_moe.select_experts = select_experts
