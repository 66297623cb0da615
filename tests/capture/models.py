"""Small hand-made models, each with one property that a real model might have.

Legend of shape suffixes: N = rows, E = experts, K = top-k, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

HIDDEN = 8
VOCAB = 50


class ToyExperts(nn.Module):
    """Adds each chosen expert's vector."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.weight_EH = nn.Parameter(torch.randn(num_experts, HIDDEN))

    def forward(
        self, hidden_NH: torch.Tensor, ids_NK: torch.Tensor, weights_NK: torch.Tensor
    ) -> torch.Tensor:
        return hidden_NH + (self.weight_EH[ids_NK] * weights_NK[..., None]).sum(1)


class ToyRouter(nn.Module):
    """Chooses `top_k` of `num_experts`; `choose` makes the choice."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, num_experts, bias=False)
        self.top_k = top_k

    def forward(self, hidden_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights_NK, ids_NK = self.choose(self.gate(hidden_NH))
        return ids_NK, weights_NK

    def choose(self, scores_NE: torch.Tensor) -> Any:
        return scores_NE.topk(self.top_k, dim=-1)


class CloningRouter(ToyRouter):
    """Returns another tensor than its top-k gave, so that only the top-k itself shows the choice."""

    def choose(self, scores_NE: torch.Tensor) -> Any:
        weights_NK, ids_NK = super().choose(scores_NE)
        return weights_NK, ids_NK.clone()


class ToyBlock(nn.Module):
    """A router and its experts."""

    def __init__(self, router: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.router = router
        self.experts = experts

    def forward(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        ids_NK, weights_NK = self.router(hidden_NH)
        return self.experts(hidden_NH, ids_NK, weights_NK)


class ToyDense(nn.Module):
    """A layer without experts."""

    def forward(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        return hidden_NH * 1.5


class ToyModel(nn.Module):
    """An embedding and a list of layers, called like a causal language model."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(layers)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        hidden_NH = self.embed(input_ids).flatten(0, 1)
        for layer in self.layers:
            hidden_NH = layer(hidden_NH)
        return hidden_NH


def toy_block(num_experts: int = 16, top_k: int = 3) -> ToyBlock:
    """Return an ordinary MoE layer."""
    return ToyBlock(ToyRouter(num_experts, top_k), ToyExperts(num_experts))


def cloning_block() -> ToyBlock:
    """Return an MoE layer whose router has to run under a mode."""
    return ToyBlock(CloningRouter(16, 3), ToyExperts(16))


def toy_model(*blocks: Callable[[], nn.Module]) -> ToyModel:
    """Return a model with these layers and fixed weights."""
    torch.manual_seed(3)
    return ToyModel([block() for block in blocks]).eval()


def toy_tokens(num_tokens: int) -> torch.Tensor:
    """Return token ids `[1, N]`."""
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(0, VOCAB, (1, num_tokens), generator=generator)
