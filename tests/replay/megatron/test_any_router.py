"""The bridge on a router that has what megatron-core's has, and nothing of megatron-core: this runs everywhere.

Legend of shape suffixes: T = rows, E = experts, K = top-k, D = hidden size.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from routebook.errors import ReplayError
from routebook.replay.megatron import RouterBridge
from routebook.routes import RouteSchema
from routebook.routes.layout import RankRows

LAYERS, EXPERTS, TOP_K, HIDDEN, ROWS = 3, 6, 2, 4, 5
SCHEMA = RouteSchema(layer_ids=(1, 2), num_experts=EXPERTS, top_k=TOP_K, num_hidden_layers=LAYERS)


class Replay:
    """A `RouterReplay` that nobody uses."""

    def __init__(self) -> None:
        self.router_replay_action = None
        self.replay_backward_list: list[torch.Tensor] = []

    def get_replay_topk(self, scores, topk, num_groups, group_topk, default_compute_topk):
        return default_compute_topk(scores, topk, num_groups, group_topk)


class Router(nn.Module):
    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.topk, self.layer_number, self.routing_type = TOP_K, layer_number, "aux_loss"
        self.config = SimpleNamespace(num_moe_experts=EXPERTS)
        self.router_replay = Replay()
        self.taken: list[list[list[int]]] = []

    def routing(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def choose(scores, topk, num_groups, group_topk):
            return torch.topk(scores, topk)

        return self.router_replay.get_replay_topk(logits_TE, self.topk, None, None, choose)

    def forward(self, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores_TK, ids_TK = self.routing(hidden_TD @ self.weight.T)
        self.taken.append(ids_TK.tolist())
        return scores_TK.softmax(-1), ids_TK


class Layer(nn.Module):
    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.router = Router(layer_number)
        self.experts = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        weights_TK, ids_TK = self.router(hidden_TD)
        return torch.tanh(hidden_TD + (weights_TK[..., None] * self.experts[ids_TK]).sum(1))


class Model(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer(number) for number in (2, 3))
        self.mtp = nn.ModuleList([Layer(1)])
        self.reentrant = reentrant

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                hidden_TD = layer(hidden_TD)
            else:
                hidden_TD = checkpoint(layer, hidden_TD, use_reentrant=self.reentrant)
        return hidden_TD.square().sum()


def hidden(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, HIDDEN, generator=generator).requires_grad_()


def rows(seed: int) -> RankRows:
    """Foreign routes; the last row has none."""
    scores = np.random.default_rng(seed).random((ROWS, 2, EXPERTS))
    ids_TLK = scores.argsort(-1)[..., :TOP_K]
    valid_T = np.arange(ROWS) < ROWS - 1
    ids_TLK[~valid_T] = -1
    return RankRows(
        ids_TLK=ids_TLK, valid_T=valid_T, padding_T=np.zeros(ROWS, bool), layer_ids=(1, 2)
    )


def gradients(reentrant: bool | None, order: tuple[int, ...]) -> list[torch.Tensor]:
    model = Model(reentrant)
    with RouterBridge(model, SCHEMA).schedule() as schedule:
        losses = []
        for seed in range(3):
            with schedule.forward(model, rows(seed)):
                losses.append(model(hidden(seed)))
        for index in order:
            losses[index].backward()
    return [p.grad for p in model.layers.parameters() if p.grad is not None]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_recomputation_takes_the_rows_of_its_forward(order):
    plain, recomputed = gradients(None, order), gradients(True, order)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_rows_are_taken_and_the_row_without_one_is_the_routers_own():
    model = Model(None)
    given = rows(1)
    model(hidden(1))
    with RouterBridge(model, SCHEMA).schedule() as schedule, schedule.forward(model, given):
        model(hidden(1))
    for index, layer in enumerate(model.layers):
        native, taken = layer.router.taken
        assert taken[:-1] == given.ids_TLK[:-1, index].tolist()
        assert len(set(taken[-1])) == TOP_K
        if index == 0:  # Deeper ones see other hidden states.
            assert taken[-1] == native[-1]


def test_routers_of_mtp_heads_are_left_alone():
    model = Model(None)
    bridge = RouterBridge(model, SCHEMA)
    assert [tap.name for tap in bridge.taps] == ["layers.0.router", "layers.1.router"]
    with bridge.schedule():
        model.mtp[0](hidden(1))


def test_a_recomputation_of_another_kind_is_an_error():
    """It keeps gradients on in the forward, so that nothing tells that the layers will run again."""
    with pytest.raises(ReplayError, match="recomputed in backward"):
        gradients(False, (0, 1, 2))


def test_a_forward_in_another_thread_is_an_error():
    """Its autograd nodes are numbered apart, so that a recomputation could be given another forward's rows."""
    model = Model(True)
    with RouterBridge(model, SCHEMA).schedule() as schedule, ThreadPoolExecutor(1) as pool:

        def forward():
            with schedule.forward(model, rows(1)):
                model(hidden(1))

        with pytest.raises(ReplayError, match="in another thread"):
            pool.submit(forward).result()
