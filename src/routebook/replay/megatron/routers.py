"""The routers of a megatron-core model: found by walking the model, and refused by name where replay cannot hold.

`RouterReplay` keeps a list of all routers that the process ever built: those of a reference model, of MTP heads, and
of decoders that were built and thrown away. A walk finds those of this model, and their layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from routebook.errors import ModelMismatchError, UncapturableError
from routebook.replay.megatron.router_tap import RouterTap
from routebook.routes import RouteSchema

_UNSEEN = {
    "sinkhorn": "sinkhorn chooses by a balanced assignment of the whole batch",
    "quantile_balancing": "quantile balancing chooses by a bias over the whole batch",
}
"""Kinds of `moe_router_load_balancing_type` that never ask `RouterReplay`."""

_REFUSED = {
    "moe_router_fusion": "the fused kernel chooses without asking RouterReplay",
    "moe_expert_capacity_factor": "a capacity drops experts after they were replayed",
    "moe_router_force_load_balancing": "it puts random numbers in place of the router's scores",
    "moe_router_force_biased": "it adds random numbers to the router's scores",
    "overlap_moe_expert_parallel_comm": "it runs the layers of two micro-batches in turns",
}
"""Options of a TransformerConfig under which given routes would not be what runs, and why."""

_GRAPHS_BESIDE_ROUTERS = {"attn", "mlp", "mamba"}


def find_taps(chunk: nn.Module, schema: RouteSchema) -> list[RouterTap]:
    """One tap for each router of a model chunk, in the order of decoder layers; routers of MTP heads are left alone.

    Args:
        chunk: the model or a chunk of it, wrapped or not.
        schema: of the records that it will replay.

    Raises:
        UncapturableError: a router that does not ask `RouterReplay`, or whose answer would not be what runs.
        ModelMismatchError: another number of experts, another top-k, or a layer that the records do not have.
    """
    taps: dict[int, RouterTap] = {}
    for name, router in _routers(chunk):
        _check_asks(name, router)
        _check_config(name, router.config)
        _check_schema(name, router, schema)
        tap = RouterTap(layer_id=router.layer_number - 1, name=name, replay=router.router_replay)
        other = taps.setdefault(tap.layer_id, tap)
        if other is not tap:
            raise UncapturableError(
                f"{other.name} and {name} both call themselves layer {tap.layer_id}; pass one model, or"
                " one chunk for each part of a virtual pipeline"
            )
    return [taps[layer_id] for layer_id in sorted(taps)]


def _routers(chunk: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in chunk.named_modules():
        is_router = hasattr(module, "routing") and hasattr(module, "topk")
        is_mtp = getattr(module, "is_mtp_layer", False) or "mtp" in name.split(".")
        if is_router and not is_mtp:
            yield name, module


def _check_asks(name: str, router: Any) -> None:
    if getattr(router, "router_replay", None) is None:
        raise UncapturableError(
            f"{name} has no RouterReplay to ask; build the model with moe_enable_routing_replay=True (or"
            " apply verl's patch before)"
        )
    if router.layer_number is None:
        raise UncapturableError(
            f"{name} does not know its layer_number; it is no part of a decoder"
        )
    kinds = router.routing_type if isinstance(router.routing_type, list) else [router.routing_type]
    for kind in kinds:
        if kind in _UNSEEN:
            raise UncapturableError(
                f"{name} has moe_router_load_balancing_type={kind!r}: {_UNSEEN[kind]} and never asks"
                " RouterReplay; use 'aux_loss', 'seq_aux_loss' or 'none'"
            )


def _check_config(name: str, config: Any) -> None:
    for option, reason in _REFUSED.items():
        value = getattr(config, option, None)
        if value is not None and value is not False:
            raise UncapturableError(
                f"{name} has {option}={value}: {reason}; switch it off to replay"
            )
    if getattr(config, "cuda_graph_impl", "none") != "none":
        scope = getattr(config, "cuda_graph_modules", None) or config.cuda_graph_scope
        graphed = {getattr(part, "name", part) for part in scope or ["the whole layer"]}
        if graphed - _GRAPHS_BESIDE_ROUTERS:
            raise UncapturableError(
                f"{name} lies in a CUDA graph ({', '.join(sorted(graphed))}), which repeats the routes that"
                f" it was captured with; graph only {', '.join(sorted(_GRAPHS_BESIDE_ROUTERS))}"
            )


def _check_schema(name: str, router: Any, schema: RouteSchema) -> None:
    model = (router.config.num_moe_experts, router.topk)
    if model != (schema.num_experts, schema.top_k):
        raise ModelMismatchError(
            f"{name} picks {model[1]} of {model[0]} experts, the records {schema.top_k} of"
            f" {schema.num_experts}; they come from another model"
        )
    if router.layer_number - 1 not in schema.layer_ids:
        raise ModelMismatchError(
            f"{name} is decoder layer {router.layer_number - 1}, counted from 0; the records have layers"
            f" {schema.layer_ids}; they come from another model, or moe_layer_freq is wrong"
        )
