"""Given routes in place of the router's own, for some tokens of a forward pass.

The expert top-k is answered with the live scores at the given ids, so the family's own code computes the weights.

Legend of shape suffixes: N = rows of the forward, E = experts, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from routebook.capture.binding import RouterBinding
from routebook.capture.interception import TopK
from routebook.errors import UncapturableError


@dataclass(frozen=True, slots=True)
class ForcedRoutes:
    """Ids that rows of one forward must take."""

    ids_NLK: torch.Tensor
    """int64, on the model's device; rows that are not forced hold anything."""
    forced_N: torch.Tensor
    """bool: which rows are forced; the others take the router's own choice."""

    def answer(self, layer_index: int, scores_NE: torch.Tensor, choose: Callable[[], TopK]) -> TopK:
        """Values and ids `[N, K]` that one layer's router shall see."""
        own_ids_NK = choose()[1]
        ids_NK = torch.where(self.forced_N[:, None], self.ids_NLK[:, layer_index], own_ids_NK)
        values_NK = scores_NE.gather(-1, ids_NK)
        result: TopK = torch.return_types.topk((values_NK, ids_NK))
        return result


@dataclass(slots=True)
class Switch:
    """Turns all taps of one capturer on for the length of a forward pass."""

    on: bool = False
    forced: ForcedRoutes | None = None


def check_forcible(bindings: Sequence[RouterBinding]) -> None:
    """Refuse routers that could not give a forced expert its weight.

    Raises:
        UncapturableError: naming the module and the reason.
    """
    for binding in bindings:
        kind = type(binding.module).__name__
        if binding.adapter is not None and binding.adapter.outputs is not None:
            raise UncapturableError(
                f"{binding.path} ({kind}) chooses without a top-k: no route can be forced"
            )
        if getattr(binding.module, "topk_method", None) == "group_limited_greedy":
            # The scores outside the live groups are zero by then, and so would be the weights.
            raise UncapturableError(
                f"{binding.path} ({kind}) chooses within groups by masked scores: no route can be forced"
            )
