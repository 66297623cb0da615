"""How the router of Phi-3.5-MoE weighs its two experts, for ids that are given.

Source of the rule: the evaluation branch of SparseMixer-v2 in transformers' `modeling_phimoe.py`. Each expert's weight
is its share in a softmax over the scores near the best one that is left. In training that router samples its choice
and scales its weights at random; a given choice has nothing to sample, so its weights are those of evaluation, with
their ordinary gradient.

Legend of shape suffixes: N = rows, E = experts, K = top-k, which is 2.
"""

from __future__ import annotations

import torch
from torch import nn


def given_weights(router: nn.Module, scores_NE: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    """Weights `[N, 2]` of the given experts, from the live scores."""
    tolerance: float = 2 * router.router_jitter_noise  # type: ignore[operator,assignment]
    first_N1, second_N1 = ids_NK[:, :1], ids_NK[:, 1:]
    left_NE = torch.scatter(scores_NE, -1, first_N1, float("-inf"))
    return torch.cat(
        [
            _share(scores_NE, scores_NE, first_N1, tolerance),
            _share(left_NE, scores_NE, second_N1, tolerance),
        ],
        dim=-1,
    )


def _share(
    left_NE: torch.Tensor, scores_NE: torch.Tensor, ids_N1: torch.Tensor, tolerance: float
) -> torch.Tensor:
    """The experts' share in the softmax over what is left and near the best of it."""
    with torch.no_grad():
        best_N1 = left_NE.max(dim=-1, keepdim=True).values
        far_NE = (best_N1 - scores_NE) / scores_NE.abs().clamp(min=best_N1) > tolerance
        # The router's own choice is never far from the best; a given one must not lose its weight.
        far_NE = far_NE.scatter(-1, ids_N1, False)
    return left_NE.masked_fill(far_NE, float("-inf")).softmax(dim=-1).gather(-1, ids_N1)
