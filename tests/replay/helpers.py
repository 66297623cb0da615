"""Batches, foreign ids and gradients for the tests of replay.

Legend of shape suffixes: B = batch, S = length, N = rows, L = MoE layers, E = experts, K = top-k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from routebook.routes import RouteSchema
from tests.families import VOCAB_SIZE


def tokens(batch: int, length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (batch, length), generator=generator)


def foreign_ids(schema: RouteSchema, num_rows: int, seed: int) -> torch.Tensor:
    """Ids that no router chose, distinct within a row, `[N, L, K]`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, schema.num_layers, schema.num_experts)
    return torch.rand(shape, generator=generator).argsort(-1)[..., : schema.top_k]


def logits_of(model: nn.Module, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=input_ids, use_cache=False, **inputs).logits
    return logits


def loss_of(model: nn.Module, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    logits = logits_of(model, input_ids, **inputs)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by name, taken away from the model."""
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)
