"""Finding the routers of a model by one dry run, or saying by name why they cannot be captured.

Numbers come from the calls that were seen, never from the names of config fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from routebook.capture.adapters import RouterAdapter, find_adapter, find_refusal
from routebook.capture.blocks import (
    BlockWatcher,
    Choice,
    ExpertsCall,
    Observation,
    Run,
    describe,
    dry_run,
    is_experts,
    modules_on_path,
)
from routebook.errors import DenseModelError, UncapturableError
from routebook.routes.schema import RouteSchema


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterBinding:
    """One decoder layer's router: the innermost module whose forward chooses the experts."""

    layer_id: int
    path: str
    module: nn.Module
    num_experts: int
    top_k: int
    output: int | None
    """Where the router's output holds its choice, if it returns the very tensor that its top-k gave."""

    adapter: RouterAdapter | None


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class DecoderLayer:
    """One entry of the outermost module list above a module."""

    list_path: str
    layer_id: int


def bind_routers(
    model: nn.Module, run: Run | None = None
) -> tuple[tuple[RouterBinding, ...], RouteSchema]:
    """Find every MoE layer of a model and the module that chooses its experts.

    Args:
        model: a decoder-only language model; modules that take no part in its forward are not bound.
        run: runs one forward pass of the model; by default a few token ids without a KV cache.

    Returns:
        The routers in the order of the decoder's layers, and the schema of their choices.

    Raises:
        DenseModelError: the model has no MoE layer.
        UncapturableError: a choice cannot be captured; the message names the module and the reason.
    """
    refuse_by_class(model)
    observation = BlockWatcher(model).watch(run or dry_run)
    chosen = _choice_of_each_layer(model, observation)
    if not chosen:
        _refuse_without_choice(model, observation)
    for choice in chosen.values():
        _refuse_ambiguous(model, observation, choice)
    bindings = tuple(_binding(model, layer, chosen[layer]) for layer in sorted(chosen))
    _refuse_differing(model, bindings)
    return bindings, _schema(model, list(chosen), bindings)


def refuse_by_class(model: nn.Module) -> None:
    """Raise UncapturableError for what a look at the modules can refuse, without a forward pass."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UncapturableError(
            f"{type(model).__name__} is an encoder-decoder model; "
            "rows belong to the tokens of one decoder, so it cannot be captured"
        )
    for path, module in model.named_modules():
        refusal = find_refusal(module)
        if refusal is not None:
            raise UncapturableError(f"{describe(model, path)} cannot be captured: {refusal.reason}")


def decoder_layer(model: nn.Module, path: str) -> DecoderLayer | None:
    """Return the entry of the outermost module list that holds the module at `path`."""
    parts = path.split(".")
    for depth in range(1, len(parts)):
        list_path = ".".join(parts[:depth])
        if isinstance(model.get_submodule(list_path), nn.ModuleList):
            return DecoderLayer(list_path=list_path, layer_id=int(parts[depth]))
    return None


def _choice_of_each_layer(model: nn.Module, observation: Observation) -> dict[DecoderLayer, Choice]:
    choices: dict[DecoderLayer, list[Choice]] = {}
    for choice in observation.choices:
        layer = decoder_layer(model, choice.path)
        if layer is not None:
            choices.setdefault(layer, []).append(choice)
    experts: dict[DecoderLayer, list[ExpertsCall]] = {}
    for call in observation.experts:
        layer = decoder_layer(model, call.path)
        if layer is None:
            raise UncapturableError(
                f"{describe(model, call.path)} is in no list of decoder layers, "
                "so that its rows have no layer"
            )
        experts.setdefault(layer, []).append(call)
    found = {
        layer: _layer_choice(model, choices.get(layer, []), experts.get(layer, []))
        for layer in choices.keys() | experts.keys()
    }
    return {layer: choice for layer, choice in found.items() if choice is not None}


def _layer_choice(
    model: nn.Module, choices: Sequence[Choice], experts: Sequence[ExpertsCall]
) -> Choice | None:
    """Return the choice of a layer's experts; None if the layer is dense."""
    received = [call for call in experts if call.ids_NK is not None]
    if len(received) > 1:
        names = " and ".join(describe(model, call.path) for call in received)
        raise UncapturableError(f"{names} are in one layer; a row holds one choice per layer")
    if received:
        return _confirmed(model, received[0], choices)
    vouched = [choice for choice in choices if find_adapter(modules_on_path(model, choice.path))]
    if len(vouched) > 1:
        names = " and ".join(describe(model, choice.path) for choice in vouched)
        raise UncapturableError(f"{names} both choose in one layer; a row holds one choice")
    if experts and not vouched:
        raise UncapturableError(
            f"{describe(model, experts[0].path)} takes no expert ids as its second input, "
            "so that nothing confirms which top-k chose its experts"
        )
    return vouched[0] if vouched else None


def _confirmed(model: nn.Module, call: ExpertsCall, choices: Sequence[Choice]) -> Choice:
    """Return the only choice whose ids are those that the experts module received."""
    assert call.ids_NK is not None
    ids_NK = call.ids_NK
    equal = [choice for choice in choices if torch.equal(choice.ids_NK.to(ids_NK.dtype), ids_NK)]
    if not equal:
        raise UncapturableError(
            f"{describe(model, call.path)} received ids that no top-k in its layer chose "
            "(they come from a hash of the tokens, or from a fused kernel)"
        )
    if len(equal) > 1:
        names = ", ".join(describe(model, choice.path) for choice in equal)
        raise UncapturableError(
            f"{describe(model, call.path)} received ids that {len(equal)} top-k calls chose alike "
            f"({names}); which of them is the router's cannot be told"
        )
    _refuse_sampling(model, equal[0])
    return equal[0]


def _refuse_sampling(model: nn.Module, choice: Choice) -> None:
    modules = modules_on_path(model, choice.path)
    adapter = find_adapter(modules)
    if adapter is not None and adapter.eval_only and modules[-1].training:
        raise UncapturableError(
            f"{describe(model, choice.path)} samples its experts in training mode; "
            "call model.eval() first"
        )


def _refuse_without_choice(model: nn.Module, observation: Observation) -> None:
    if observation.choices:
        raise UncapturableError(
            f"{describe(model, observation.choices[0].path)} takes a top-k, but no experts module "
            "receives its ids, so that it cannot be told from other uses of top-k"
        )
    idle = [path for path, module in model.named_modules() if is_experts(module)]
    if idle:
        raise UncapturableError(
            f"{describe(model, idle[0])} took no part in the dry run, "
            "so that its router cannot be found"
        )
    raise DenseModelError(
        f"{type(model).__name__} has no mixture-of-experts layer, so there are no experts to "
        "capture; name a mixture-of-experts model"
    )


def _refuse_ambiguous(model: nn.Module, observation: Observation, choice: Choice) -> None:
    """Refuse a router in whose forward the expert top-k is not the only one over as many scores."""
    same = [
        other
        for other in observation.choices
        if other.num_experts == choice.num_experts
        and (other.path == choice.path or other.path.startswith(f"{choice.path}."))
    ]
    if len(same) > 1:
        raise UncapturableError(
            f"{describe(model, choice.path)} took {len(same)} top-k over {choice.num_experts} "
            "scores in one forward pass; which of them chooses the experts cannot be told"
        )


def _binding(model: nn.Module, layer: DecoderLayer, choice: Choice) -> RouterBinding:
    return RouterBinding(
        layer_id=layer.layer_id,
        path=choice.path,
        module=model.get_submodule(choice.path),
        num_experts=choice.num_experts,
        top_k=choice.ids_NK.shape[-1],
        output=choice.output,
        adapter=find_adapter(modules_on_path(model, choice.path)),
    )


def _refuse_differing(model: nn.Module, bindings: Sequence[RouterBinding]) -> None:
    """Refuse layers that differ in the number of experts or in top-k."""
    for one, two in pairwise(bindings):
        if (one.num_experts, one.top_k) != (two.num_experts, two.top_k):
            raise UncapturableError(
                f"{describe(model, one.path)} takes {one.top_k} of {one.num_experts} experts, but "
                f"{describe(model, two.path)} takes {two.top_k} of {two.num_experts}; "
                "all layers of a record must agree"
            )


def _schema(
    model: nn.Module, layers: Sequence[DecoderLayer], bindings: Sequence[RouterBinding]
) -> RouteSchema:
    list_paths = sorted({layer.list_path for layer in layers})
    if len(list_paths) > 1:
        raise UncapturableError(
            f"routers are in several lists of layers ({', '.join(list_paths)}), not in one decoder"
        )
    decoder = model.get_submodule(list_paths[0])
    assert isinstance(decoder, nn.ModuleList)
    return RouteSchema(
        layer_ids=tuple(binding.layer_id for binding in bindings),
        num_experts=bindings[0].num_experts,
        top_k=bindings[0].top_k,
        num_hidden_layers=len(decoder),
    )
