"""What is bound, and what is refused by name, on hand-made models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from routebook.capture.binding import bind_routers
from routebook.capture.blocks import dry_run_tokens
from routebook.errors import DenseModelError, UncapturableError
from tests.capture.models import (
    HIDDEN,
    ToyBlock,
    ToyDense,
    ToyExperts,
    ToyModel,
    ToyRouter,
    cloning_block,
    toy_block,
    toy_model,
)


def test_dense_layers_shift_no_index() -> None:
    bindings, schema = bind_routers(toy_model(ToyDense, toy_block, ToyDense, toy_block, ToyDense))
    assert [binding.path for binding in bindings] == ["layers.1.router", "layers.3.router"]
    assert schema.layer_ids == (1, 3)
    assert (schema.num_experts, schema.top_k, schema.num_hidden_layers) == (16, 3, 5)


def test_a_router_is_read_at_its_output_only_if_it_returns_its_choice_itself() -> None:
    bindings, _ = bind_routers(toy_model(toy_block, cloning_block))
    assert [binding.output for binding in bindings] == [0, None]


def test_layers_are_in_the_order_of_their_numbers() -> None:
    _, schema = bind_routers(toy_model(*[toy_block] * 12))
    assert schema.layer_ids == tuple(range(12))


class DraftModel(ToyModel):
    """Holds a draft layer and an orphan router that its forward never runs."""

    def __init__(self) -> None:
        super().__init__([toy_block(), toy_block()])
        self.mtp = nn.ModuleList([toy_block()])
        self.orphan = ToyRouter(16, 3)
        self.layers[0].old_experts = ToyExperts(16)


def test_modules_that_do_not_run_are_not_bound() -> None:
    bindings, _ = bind_routers(DraftModel())
    assert [binding.path for binding in bindings] == ["layers.0.router", "layers.1.router"]


def test_the_callers_run_decides_what_runs() -> None:
    def run(model: nn.Module) -> None:
        model.mtp[0](torch.randn(13, HIDDEN))

    bindings, _ = bind_routers(DraftModel(), run)
    assert [binding.path for binding in bindings] == ["mtp.0.router"]


def test_hooks_are_gone_after_the_dry_run() -> None:
    model = toy_model(toy_block)
    bind_routers(model)
    with pytest.raises(ZeroDivisionError):
        bind_routers(model, lambda _: 1 // 0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class GroupRouter(ToyRouter):
    """Picks two of four groups first, with a top-k over the groups' scores."""

    def choose(self, scores_NE: torch.Tensor) -> Any:
        groups = scores_NE.view(-1, 4, scores_NE.shape[-1] // 4)
        best = groups.topk(min(2, groups.shape[-1]), dim=-1)[0].sum(-1).topk(2, dim=-1)[1]
        live = torch.zeros_like(groups[..., 0]).scatter(1, best, 1.0)[..., None].expand_as(groups)
        return scores_NE.masked_fill(live.reshape_as(scores_NE) == 0, -9.0).topk(self.top_k)


def test_a_top_k_over_groups_is_not_the_choice() -> None:
    bindings, _ = bind_routers(toy_model(lambda: ToyBlock(GroupRouter(16, 3), ToyExperts(16))))
    assert (bindings[0].num_experts, bindings[0].top_k) == (16, 3)


def test_groups_as_many_as_experts_are_refused() -> None:
    """Two top-k over four scores each: which one is the choice cannot be told at run time."""
    model = toy_model(lambda: ToyBlock(GroupRouter(4, 1), ToyExperts(4)))
    with pytest.raises(UncapturableError, match=r"layers\.0\.router \(GroupRouter\) took 2 top-k"):
        bind_routers(model)


class TwiceRouter(ToyRouter):
    """Takes the same choice twice, over other numbers of scores."""

    def choose(self, scores_NE: torch.Tensor) -> Any:
        padded = torch.cat([scores_NE, torch.full_like(scores_NE[:, :1], -99.0)], dim=-1)
        padded.topk(self.top_k)
        return scores_NE.topk(self.top_k)


def test_two_choices_alike_are_refused() -> None:
    model = toy_model(lambda: ToyBlock(TwiceRouter(16, 3), ToyExperts(16)))
    with pytest.raises(UncapturableError, match=r"ToyExperts\) received ids that 2 top-k"):
        bind_routers(model)


class HashRouter(ToyRouter):
    """Chooses without looking at scores."""

    def choose(self, scores_NE: torch.Tensor) -> Any:
        ids_NK = (torch.arange(len(scores_NE))[:, None] * 5 + torch.arange(self.top_k)) % 16
        return torch.ones(ids_NK.shape), ids_NK


class ShuffledRouter(ToyRouter):
    """Renumbers its choice after the top-k, as an expert-parallel remap would."""

    def choose(self, scores_NE: torch.Tensor) -> Any:
        weights_NK, ids_NK = scores_NE.topk(self.top_k)
        return weights_NK, 15 - ids_NK


class ArgmaxRouter(ToyRouter):
    """Chooses one expert with argmax."""

    def choose(self, scores_NE: torch.Tensor) -> Any:
        return scores_NE.max(dim=-1, keepdim=True)


@pytest.mark.parametrize("router_class", [HashRouter, ShuffledRouter, ArgmaxRouter])
def test_ids_that_no_top_k_chose_are_refused(router_class: type[ToyRouter]) -> None:
    model = toy_model(toy_block, lambda: ToyBlock(router_class(16, 3), ToyExperts(16)))
    with pytest.raises(UncapturableError, match=r"layers\.1\.experts \(ToyExperts\) received ids"):
        bind_routers(model)


def test_the_choice_of_another_layer_confirms_nothing() -> None:
    """Layer 1 runs with layer 0's ids; its own top-k is another one."""
    model = toy_model(toy_block, toy_block)
    seen: list[torch.Tensor] = []
    model.layers[0].experts.register_forward_pre_hook(lambda m, args: seen.append(args[1]))
    model.layers[1].experts.register_forward_pre_hook(lambda m, args: (args[0], seen[-1], args[2]))
    with pytest.raises(UncapturableError, match=r"layers\.1\.experts"):
        bind_routers(model)


class FusedExperts(ToyExperts):
    """Routes inside and takes no ids."""

    def forward(self, hidden_NH: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weights_NK, ids_NK = (hidden_NH @ self.weight_EH.T).topk(3)
        return super().forward(hidden_NH, ids_NK, weights_NK)


def test_experts_that_take_no_ids_are_refused() -> None:
    with pytest.raises(UncapturableError, match=r"FusedExperts\) takes no expert ids"):
        bind_routers(toy_model(lambda: FusedExperts(16)))


class DenselyMixed(ToyDense):
    """Two routers of a family whose experts take no ids, in one layer."""

    def __init__(self) -> None:
        super().__init__()
        router_class = type("Llama4Router", (ToyRouter,), {})
        self.one, self.two = router_class(16, 3), router_class(16, 3)

    def forward(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        return hidden_NH + self.one(hidden_NH)[1].sum() + self.two(hidden_NH)[1].sum()


def test_two_routers_in_one_layer_are_refused() -> None:
    with pytest.raises(UncapturableError, match=r"layers\.0\.one .* and layers\.0\.two .*choose"):
        bind_routers(toy_model(DenselyMixed))


class SparseActivation(ToyDense):
    """A dense layer that keeps its largest activations: a top-k, but no choice of experts."""

    def forward(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        values, places = hidden_NH.topk(2)
        return torch.zeros_like(hidden_NH).scatter(1, places, values)


def test_another_top_k_is_not_taken_for_a_router() -> None:
    with pytest.raises(
        UncapturableError, match=r"SparseActivation\) takes a top-k, but no experts"
    ):
        bind_routers(toy_model(SparseActivation))
    bindings, _ = bind_routers(toy_model(SparseActivation, toy_block))
    assert [binding.path for binding in bindings] == ["layers.1.router"]


@pytest.mark.parametrize(("num_experts", "top_k"), [(12, 3), (16, 2)])
def test_layers_that_differ_are_refused(num_experts: int, top_k: int) -> None:
    model = toy_model(toy_block, lambda: toy_block(num_experts, top_k))
    with pytest.raises(UncapturableError, match=f"3 of 16 experts, but .*{top_k} of {num_experts}"):
        bind_routers(model)


def test_two_mixtures_in_one_layer_are_refused() -> None:
    model = toy_model(lambda: nn.Sequential(toy_block(), toy_block()))
    with pytest.raises(UncapturableError, match="are in one layer"):
        bind_routers(model)


def test_a_layer_that_runs_twice_is_refused() -> None:
    def twice() -> nn.Module:
        block = toy_block()
        return nn.Sequential(block, block)

    with pytest.raises(UncapturableError, match="are in one layer"):
        bind_routers(toy_model(twice))


def test_routers_in_two_lists_are_refused() -> None:
    def run(model: nn.Module) -> None:
        model.mtp[0](torch.randn(13, HIDDEN))
        model.layers[1](torch.randn(13, HIDDEN))

    with pytest.raises(UncapturableError, match="layers, mtp"):
        bind_routers(DraftModel(), run)


def test_experts_outside_of_any_list_are_refused() -> None:
    class NoList(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = toy_block()

    with pytest.raises(UncapturableError, match=r"block\.experts \(ToyExperts\) is in no list"):
        bind_routers(NoList(), lambda model: model.block(torch.randn(13, HIDDEN)))


def test_dense_and_idle_models() -> None:
    with pytest.raises(DenseModelError, match="ToyModel has no mixture-of-experts layer"):
        bind_routers(toy_model(ToyDense))
    with pytest.raises(UncapturableError, match=r"layers\.0\.experts .*took no part"):
        bind_routers(toy_model(toy_block), lambda _: None)
    with pytest.raises(UncapturableError, match="pass `run`"):
        bind_routers(nn.Sequential(toy_block()))


def test_the_dry_runs_rows_are_no_size_of_the_model() -> None:
    model = toy_model(lambda: toy_block(11, 3), lambda: toy_block(12, 3), lambda: toy_block(13, 3))
    assert dry_run_tokens(model).shape == (1, 14)
    assert int(dry_run_tokens(model).max()) < 50
