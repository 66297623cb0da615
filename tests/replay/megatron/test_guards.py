"""What megatron-core takes without a word, or with one that helps nobody, is an error of the bridge with a message."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from routebook.errors import ModelMismatchError, ReplayError, SchemaMismatchError, UncapturableError
from routebook.replay.megatron import RouterBridge, parallel_rank
from routebook.routes.layout import RankRows
from tests.replay.megatron import models, taken
from tests.replay.megatron.distributed_run import RECOMPUTE

pytestmark = [
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:::megatron.*"),
]


@pytest.fixture(scope="module", params=["alltoall", "allgather"])
def chunks(request, megatron):
    return models.build(moe_token_dispatcher_type=request.param)


@pytest.fixture
def model(megatron):
    return models.build()[0]


@pytest.fixture
def checkpointed(megatron):
    return models.build(**RECOMPUTE["full"])[0]


def rows_of(model, seed=1) -> RankRows:
    batch = models.batch_of(model.config, models.records_of(seed), seed)
    return batch.rows_for(parallel_rank(model))


def logits_of(model, seed=1, **kwargs):
    tokens_BS = models.tokens_of(seed)
    positions_BS = torch.arange(models.LENGTH).expand(tokens_BS.shape)
    mask = torch.ones(models.LENGTH, models.LENGTH).triu(1).bool()[None, None]
    return model(tokens_BS, positions_BS, mask, **kwargs)


def output_of(model, seed=1):
    """The loss; its backward changes the logits in place, so that it has one only."""
    return logits_of(model, seed, labels=models.tokens_of(seed).roll(-1, 1)).mean()


def bridge_of(model) -> RouterBridge:
    return RouterBridge(model, models.SCHEMA)


def with_ids(rows: RankRows, change) -> RankRows:
    ids_TLK = rows.ids_TLK.copy()
    return replace(rows, ids_TLK=change(ids_TLK))


def put(value):
    def change(ids_TLK):
        ids_TLK[3, 1] = value
        return ids_TLK

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(-1), r"row 3 of the batch, layer 2, has ids \[-1, -1\]"),
        (put(models.EXPERTS), "none of 8 experts"),
        (put(0), "name an expert twice"),
        (lambda ids: ids[:, :, :1].copy(), r"shape \[24, 3, 1\]"),
        (lambda ids: ids[:-3].copy(), r"shape \[21, 3, 2\] for 24 rows"),
        (lambda ids: ids[:, :2].copy(), r"shape \[24, 2, 2\]"),
        (lambda ids: ids.astype(np.float32), "float32"),
    ],
)
def test_damaged_rows_are_refused(chunks, change, message):
    (model,) = chunks
    with (
        pytest.raises(SchemaMismatchError, match=message),
        bridge_of(model).schedule() as schedule,
        schedule.forward(model, with_ids(rows_of(model), change)),
    ):
        raise AssertionError


@pytest.mark.parametrize("num_rows", [21, 48])
def test_another_number_of_rows_than_the_router_sees_is_an_error(chunks, num_rows):
    """Some dispatchers leave the last tokens without any expert."""
    (model,) = chunks
    rows = rows_of(model)
    cut = [
        np.resize(a, (num_rows, *a.shape[1:])) for a in (rows.ids_TLK, rows.valid_T, rows.padding_T)
    ]
    short = RankRows(ids_TLK=cut[0], valid_T=cut[1], padding_T=cut[2], layer_ids=rows.layer_ids)
    with (
        pytest.raises(ReplayError, match=rf"sees 24 rows and picks 2, .* \[{num_rows}, 2\]"),
        bridge_of(model).schedule() as schedule,
        schedule.forward(model, short),
    ):
        output_of(model)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64, np.uint16])
def test_every_integer_dtype_is_taken(model, dtype):
    rows = rows_of(model)
    narrow = with_ids(rows, lambda ids: np.where(ids < 0, 0, ids).astype(dtype))
    losses = []
    with bridge_of(model).schedule() as schedule, torch.no_grad():
        for given in (rows, narrow):
            with schedule.forward(model, given):
                losses.append(output_of(model).item())
    assert losses[0] == losses[1]


def test_only_rows_without_a_route_take_the_live_router(model):
    rows = rows_of(model)
    assert 0 < rows.valid_T.sum() < len(rows.valid_T)
    with taken.routing_maps(model) as native, torch.no_grad():
        output_of(model)
    with (
        taken.routing_maps(model) as maps,
        torch.no_grad(),
        bridge_of(model).schedule() as schedule,
        schedule.forward(model, rows),
    ):
        output_of(model)
    valid_T = torch.from_numpy(rows.valid_T)
    for layer, (own, given) in enumerate(zip(native, maps, strict=True)):
        ids_TK = torch.from_numpy(rows.ids_TLK)[:, layer]
        assert taken.has_routes(given[0], ids_TK, valid_T)
        assert (given[0].sum(1) == models.TOP_K).all()
        if layer == 0:  # Deeper ones see other hidden states.
            assert torch.equal(given[0][~valid_T], own[0][~valid_T])


def test_experts_get_the_tokens_that_the_rows_name(model):
    counts = []
    experts = model.decoder.layers[3].mlp.experts
    handle = experts.register_forward_pre_hook(lambda m, args: counts.append(args[1].tolist()))
    record = models.records_of(1)
    rows = rows_of(model)
    # Every row of the batch gets a route, so that all counts are known.
    full = replace(rows, valid_T=np.ones_like(rows.valid_T), padding_T=np.zeros_like(rows.valid_T))
    pick = np.where(rows.ids_TLK < 0, np.array([0, 5]), rows.ids_TLK)
    given = with_ids(full, lambda ids: pick)
    with torch.no_grad(), bridge_of(model).schedule() as schedule, schedule.forward(model, given):
        output_of(model)
    handle.remove()
    expected = np.zeros(models.EXPERTS, int)
    for ids_TLK in (r.ids_TLK for r in record):
        expected += np.bincount(ids_TLK[:, 2].reshape(-1), minlength=models.EXPERTS)
    expected[[0, 5]] += models.BATCH * models.LENGTH - sum(len(r.ids_TLK) for r in record)
    assert counts == [expected.tolist()]


def test_gradient_reaches_the_router_through_the_replayed_scores(model):
    with bridge_of(model).schedule() as schedule, schedule.forward(model, rows_of(model)):
        output_of(model).backward()
    for router in models.routers_of(model):
        assert router.weight.grad.abs().sum() > 0


def test_recomputation_takes_the_rows_of_its_forward_in_any_order(checkpointed, model):
    """Backward from the last micro-batch to the first: a queue would give each the other's rows."""
    model.load_state_dict(checkpointed.state_dict())
    grads = []
    for module in (model, checkpointed):
        module.zero_grad()
        with bridge_of(module).schedule() as schedule:
            losses = []
            for seed in (1, 2, 3):
                with schedule.forward(module, rows_of(module, seed)):
                    losses.append(output_of(module, seed))
            for loss in (losses[2], losses[0], losses[1]):
                loss.backward()
        grads.append(models.gradients([module]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_pass_without_gradients_leaves_nothing_behind(checkpointed):
    bridge = bridge_of(checkpointed)
    with bridge.schedule() as schedule:
        with torch.no_grad(), schedule.forward(checkpointed, rows_of(checkpointed)):
            output_of(checkpointed)
        assert sum(tap.num_kept for tap in bridge.taps) == 0
        with schedule.forward(checkpointed, rows_of(checkpointed)):
            loss = output_of(checkpointed)
        assert sum(tap.num_kept for tap in bridge.taps) == 3
        loss.backward()
        assert sum(tap.num_kept for tap in bridge.taps) == 0


def test_a_checkpointed_forward_without_backward_is_told_at_the_end(checkpointed):
    with (
        pytest.raises(ReplayError, match=r"1 checkpointed forwards of decoder.layers.1.* never"),
        bridge_of(checkpointed).schedule() as schedule,
        schedule.forward(checkpointed, rows_of(checkpointed)),
    ):
        output_of(checkpointed)


def test_backward_of_a_forward_that_no_schedule_kept_is_an_error(checkpointed):
    loss = output_of(checkpointed)
    with (
        pytest.raises(ReplayError, match=r"recomputed in backward, by .*Checkpoint"),
        bridge_of(checkpointed).schedule(),
    ):
        loss.backward()


def test_a_second_backward_of_the_same_forward_is_an_error(checkpointed):
    with bridge_of(checkpointed).schedule() as schedule:
        losses = []
        for seed in (1, 2):
            with schedule.forward(checkpointed, rows_of(checkpointed, seed)):
                losses.append(logits_of(checkpointed, seed).square().mean())
        losses[0].backward(retain_graph=True)
        with pytest.raises(ReplayError, match="was recomputed before"):
            losses[0].backward()
        losses[1].backward()


def test_a_forward_without_rows_inside_of_a_schedule_is_an_error(model):
    with (
        pytest.raises(ReplayError, match=r"outside of schedule\.forward"),
        bridge_of(model).schedule(),
    ):
        output_of(model)


def test_two_forwards_for_one_set_of_rows_are_an_error(model):
    with bridge_of(model).schedule() as schedule, schedule.forward(model, rows_of(model)):
        output_of(model)
        with pytest.raises(ReplayError, match="a second time"):
            output_of(model)


def test_a_router_that_does_not_ask_is_named(model, monkeypatch):
    """What fused kernels do: choose, and leave RouterReplay alone."""
    router = models.routers_of(model)[1]
    bridge = bridge_of(model)
    monkeypatch.setattr(router, "router_replay", None)
    with (
        pytest.raises(ReplayError, match=r"decoder\.layers\.2\.mlp\.router did not ask"),
        bridge.schedule() as schedule,
        schedule.forward(model, rows_of(model)),
    ):
        output_of(model)


def test_entries_left_by_another_replay_are_refused(model):
    router = models.routers_of(model)[0].router_replay
    router.set_target_indices(torch.zeros(24, 2, dtype=torch.long))
    bridge = bridge_of(model)
    with pytest.raises(ReplayError, match="holds 1 stale entries"), bridge.schedule():
        raise AssertionError
    router.clear_indices()
    with pytest.raises(ReplayError, match="holds 1 stale entries"), bridge.schedule():
        router.set_target_indices(torch.zeros(24, 2, dtype=torch.long))
    router.clear_indices()
    router.set_router_replay_action(taken.record_action())
    with pytest.raises(ReplayError, match=r"has the action .*RECORD"), bridge.schedule():
        raise AssertionError


def test_two_schedules_at_once_are_refused(model):
    with (
        bridge_of(model).schedule(),
        pytest.raises(ReplayError, match="another schedule"),
        bridge_of(model).schedule(),
    ):
        raise AssertionError


def test_after_a_schedule_the_model_is_as_it_was(model):
    native = output_of(model).item()
    bridge = bridge_of(model)
    with (
        pytest.raises(KeyError),
        bridge.schedule() as schedule,
        schedule.forward(model, rows_of(model)),
    ):
        raise KeyError
    assert output_of(model).item() == native
    with (
        pytest.raises(ReplayError, match="schedule is over"),
        schedule.forward(model, rows_of(model)),
    ):
        raise AssertionError
    with bridge.schedule() as schedule, schedule.forward(model, rows_of(model)):
        assert output_of(model).item() != native


def test_another_model_of_the_process_is_not_touched(model):
    """The process-global list holds the routers of both; so does that of a decoder that was built twice."""
    other = models.build()[0]
    native = output_of(other).item()
    with bridge_of(model).schedule() as schedule:
        assert output_of(other).item() == native
        with (
            pytest.raises(ReplayError, match="was not built with"),
            schedule.forward(other, rows_of(model)),
        ):
            raise AssertionError


def test_rows_of_another_chunk_are_refused(model):
    rows = rows_of(model)
    shifted = replace(rows, layer_ids=(0, 1, 2))
    with (
        pytest.raises(SchemaMismatchError, match=r"layers \(0, 1, 2\) for a chunk .* \(1, 2, 3\)"),
        bridge_of(model).schedule() as schedule,
        schedule.forward(model, shifted),
    ):
        raise AssertionError


def test_a_wrapped_model_is_known_by_its_wrapper_and_by_itself(model):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = model

    wrapper = Wrapper()
    with bridge_of(wrapper).schedule() as schedule, torch.no_grad():
        for chunk in (wrapper, model):
            with schedule.forward(chunk, rows_of(model)):
                output_of(model)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("moe_router_fusion", True, "moe_router_fusion=True: the fused kernel"),
        ("moe_expert_capacity_factor", 1.0, "moe_expert_capacity_factor=1.0"),
        ("moe_router_force_load_balancing", True, "random numbers"),
        ("moe_router_force_biased", 0.1, "random numbers"),
        ("overlap_moe_expert_parallel_comm", True, "two micro-batches in turns"),
    ],
)
def test_options_under_which_replay_cannot_hold_are_refused(model, option, value, message):
    setattr(model.config, option, value)
    with pytest.raises(UncapturableError, match=message):
        bridge_of(model)


@pytest.mark.parametrize("kind", ["sinkhorn", "quantile_balancing"])
def test_routers_that_never_ask_are_refused(model, kind):
    models.routers_of(model)[2].routing_type = kind
    with pytest.raises(UncapturableError, match=rf"layers\.3\.mlp\.router has .*'{kind}'"):
        bridge_of(model)


def test_a_router_in_a_cuda_graph_is_refused(model):
    name = (
        "cuda_graph_modules" if hasattr(model.config, "cuda_graph_modules") else "cuda_graph_scope"
    )
    model.config.cuda_graph_impl = "transformer_engine"
    setattr(model.config, name, [SimpleNamespace(name="attn")])
    bridge_of(model)
    for scope in ([], [SimpleNamespace(name="attn"), SimpleNamespace(name="moe_router")]):
        setattr(model.config, name, scope)
        with pytest.raises(UncapturableError, match="CUDA graph"):
            bridge_of(model)


def test_a_model_built_without_replay_is_refused(megatron):
    (model,) = models.build(moe_enable_routing_replay=False)
    with pytest.raises(UncapturableError, match="moe_enable_routing_replay=True"):
        bridge_of(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 16}, "2 of 8 experts, the records 2 of 16"),
        ({"top_k": 1}, "2 of 8 experts, the records 1 of 8"),
        ({"layer_ids": (0, 2, 3)}, "is decoder layer 1, counted from 0"),
    ],
)
def test_records_of_another_model_are_refused(model, change, message):
    with pytest.raises(ModelMismatchError, match=message):
        RouterBridge(model, replace(models.SCHEMA, **change))


def test_the_same_chunk_twice_is_refused(model):
    for other in (model, models.build()[0]):
        with pytest.raises(UncapturableError, match="two chunks have layer 1"):
            RouterBridge([model, other], models.SCHEMA)
