"""What single model families do differently, as data.

Most families need nothing from this file: their experts module receives the ids, which confirms the
router's top-k. A family is named here when it has no such module, or makes its choice without a
top-k, or cannot be captured.

Legend of shape suffixes: N = rows, E = experts, K = top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from routebook.capture.phimoe import given_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterAdapter:
    """How to read the choice of one family's router."""

    name: str
    router_class: str
    """Name of the router's class."""

    outside: tuple[str, ...] = ()
    """Inside modules of these classes the router chooses something else than a layer's experts."""

    outputs: tuple[int, int] | None = None
    """For a router without a top-k: where in its output the scores `[N, E]` and the ids `[N, K]` are."""

    weights: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """For a router without a top-k: the weights `[N, K]` of given ids, from the router, its scores and the ids."""

    method: str = "forward"
    """The method that makes the choice; a narrower one than `forward` spares the experts the interception."""

    eval_only: bool = False
    """In training mode the router samples, so that its choice is another one."""

    def applies_to(self, modules: Sequence[nn.Module]) -> bool:
        """Whether the last of `modules`, a path from the model down, is this adapter's router."""
        names = [type(module).__name__ for module in modules]
        return names[-1] == self.router_class and not set(names) & set(self.outside)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A class of modules that makes a model impossible to capture."""

    class_suffix: str
    reason: str


ADAPTERS = (
    # Two rounds of max with masking in between, no top-k.
    RouterAdapter(
        name="phimoe",
        router_class="PhimoeTopKRouter",
        outputs=(0, 2),
        weights=given_weights,
        eval_only=True,
    ),
    # Every expert sees every token, scaled by zero where it was not chosen: no ids are passed on.
    RouterAdapter(name="llama4", router_class="Llama4Router"),
    # The block itself is the router: its forward also runs the experts.
    RouterAdapter(
        name="jamba", router_class="JambaSparseMoeBlock", method="route_tokens_to_experts"
    ),
    RouterAdapter(name="dbrx", router_class="DbrxFFN", method="route_tokens_to_experts"),
    # The experts receive a sorted permutation. The attention is a mixture as well; a record holds the
    # choice of the feed-forward experts, as it does in every other family.
    RouterAdapter(name="jetmoe", router_class="JetMoeTopKGating", outside=("JetMoeMoA",)),
)

REFUSALS = (
    Refusal(
        class_suffix="Indexer",
        reason="its attention chooses keys with an indexer, which needs a dense mask and a key "
        "cache of its own",
    ),
    Refusal(
        class_suffix="CDMoE",
        reason="it finds experts by product keys inside the block, so no module receives the ids "
        "of a choice",
    ),
)


def find_adapter(modules: Sequence[nn.Module]) -> RouterAdapter | None:
    """Return the adapter of the last of `modules`, a path from the model down, if it has one."""
    return next((adapter for adapter in ADAPTERS if adapter.applies_to(modules)), None)


def find_refusal(module: nn.Module) -> Refusal | None:
    """Return why a model that holds `module` cannot be captured, or None."""
    name = type(module).__name__
    return next((refusal for refusal in REFUSALS if name.endswith(refusal.class_suffix)), None)
