"""The experts' matrix products, by what suits the device and the step.

transformers lets a model choose among registered implementations of its experts. On the CPU its grouped one spends
a third of a small decode step beside the products, on bookkeeping that exists for other devices. The one here computes
the same products in the same order, and hands everything but the plain case to the original. On CUDA a small step runs
over copies of the picked experts' weights, as transformers' own `generate` decodes: the grouped products have a kernel
for bfloat16 only, and for other dtypes wait for the device.

Legend of shape suffixes: N = tokens, K = top-k, S = N * K picks, D = hidden size.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

EXPERTS_NAME = "routebook_experts"
_MOST_PICKED_BYTES = 2**28
"""Copies of weights that one layer of a step may make on CUDA."""


def register_experts() -> None:
    """Make the implementation known to transformers; doing it again changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)


def experts_forward(
    self: Any, hidden_ND: torch.Tensor, topk_ids_NK: torch.Tensor, weights_NK: torch.Tensor
) -> torch.Tensor:
    """Run each token through its experts and sum their outputs by weight: `[N, D]`."""
    if hidden_ND.device.type == "cuda" and _picked_nbytes(self, topk_ids_NK) <= _MOST_PICKED_BYTES:
        picked: torch.Tensor = batched_mm_experts_forward(self, hidden_ND, topk_ids_NK, weights_NK)
        return picked
    if hidden_ND.device.type == "cuda" or not _is_plain(self):
        output: torch.Tensor = grouped_mm_experts_forward(self, hidden_ND, topk_ids_NK, weights_NK)
        return output
    num_tokens, top_k = topk_ids_NK.shape
    expert_S, order_S = torch.sort(topk_ids_NK.reshape(-1))
    ends = torch.searchsorted(expert_S, _numbers(self.num_experts), right=True, out_int32=True)
    rows = hidden_ND.index_select(0, torch.div(order_S, top_k, rounding_mode="floor"))
    gated = self._apply_gate(_products(rows, self.gate_up_proj, ends))
    picked_SD = _products(gated, self.down_proj, ends)
    picked_SD = torch.empty_like(picked_SD).index_copy_(0, order_S, picked_SD)
    picked_NKD = picked_SD.view(num_tokens, top_k, -1)
    return torch.bmm(weights_NK.to(picked_NKD.dtype)[:, None], picked_NKD)[:, 0]


@cache
def _numbers(count: int) -> torch.Tensor:
    """0, 1, ... on the CPU; made once, and outside of any inference mode that a caller may be in."""
    with torch.inference_mode(False):
        return torch.arange(count)


def _picked_nbytes(experts: Any, topk_ids_NK: torch.Tensor) -> int:
    """Bytes of the weights of all picks of a step, each pick counted."""
    weights = [experts.gate_up_proj if experts.has_gate else experts.up_proj, experts.down_proj]
    per_pick: int = sum(weight.nbytes // len(weight) for weight in weights)
    return per_pick * topk_ids_NK.numel()


def _is_plain(experts: Any) -> bool:
    """Gated, without biases, stored as transformers stores most families, all experts in this process."""
    return bool(
        experts.has_gate
        and not experts.has_bias
        and not experts.is_transposed
        and not experts._is_expert_parallel
    )


def _products(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch._grouped_mm(rows, weights.transpose(-2, -1), offs=ends)
    return product
