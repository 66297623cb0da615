"""Replay on a tiny model of every family: own ids change nothing, foreign ids reach the experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from routebook.errors import DenseModelError, ModelError, UncapturableError
from routebook.replay import RouteSession, record, replay
from tests.capture.recorder import ExpertsRecorder
from tests.families import REFUSED, SERVED
from tests.replay.helpers import (
    foreign_ids,
    gradients,
    largest_difference,
    logits_of,
    loss_of,
    tokens,
)

BATCH, LENGTH = 2, 13
NUM_ROWS = BATCH * LENGTH
CHECKPOINTED = [name for name in SERVED if name != "jetmoe"]  # it has no checkpointing
NO_WEIGHTS = ("Llama4TextExperts", "JetMoeParallelExperts")


def trained(name: str, use_reentrant: bool | None = None) -> Any:
    """A model in training mode; phimoe in evaluation mode unless it is checkpointed, since it would sample."""
    model = SERVED[name].build()
    if name != "phimoe" or use_reentrant is not None:
        model.train()
    if use_reentrant is not None:
        options = {"use_reentrant": use_reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.enable_input_require_grads()
    return model


def interleaved(model: nn.Module, session: RouteSession | None, routes: Any) -> dict[str, Any]:
    """Gradients of two micro-batches: forward, forward, backward, backward."""
    losses = []
    for index in range(2):
        input_ids = tokens(BATCH, LENGTH, index)
        if session is None:
            losses.append(loss_of(model, input_ids))
        else:
            with session.forward(routes[index]):
                losses.append(loss_of(model, input_ids))
    for loss in losses:
        loss.backward()
    return gradients(model)


@torch.no_grad()
@pytest.mark.parametrize("name", SERVED)
def test_own_ids_leave_the_logits_bitwise(name):
    model = SERVED[name].build()
    input_ids = tokens(BATCH, LENGTH, 0)
    plain = logits_of(model, input_ids)
    with record(model) as forwards:
        recorded = logits_of(model, input_ids)
    with replay(model, forwards[0].records()):
        replayed = logits_of(model, input_ids)
    assert torch.equal(plain, recorded)
    assert torch.equal(plain, replayed)


@pytest.mark.parametrize("name", [name for name in SERVED if name != "phimoe"])
def test_own_ids_leave_the_gradients_bitwise(name):
    model = trained(name)
    native = interleaved(model, None, None)
    session = RouteSession(model)
    with torch.no_grad(), session.recording() as forwards:
        for index in range(2):
            logits_of(model, tokens(BATCH, LENGTH, index))
    replayed = interleaved(model, session, [forward.records() for forward in forwards])
    assert largest_difference(native, replayed) == 0.0


def test_phimoe_in_evaluation_mode_keeps_its_gradients():
    test_own_ids_leave_the_gradients_bitwise("phimoe")


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTED)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpointed_micro_batches_take_their_own_routes(name, use_reentrant):
    """Both runs are replayed along foreign ids, with some rows native; only one recomputes its layers."""
    grads = []
    for reentrant in (None, use_reentrant):
        model = trained(name, reentrant)
        model.train(name != "phimoe")
        session = RouteSession(model)
        routes = [foreign_ids(session.schema, NUM_ROWS, seed) for seed in (5, 6)]
        routes[0][3:7] = routes[1][11:] = -1
        grads.append(interleaved(model, session, routes))
    assert largest_difference(*grads) == 0.0


def test_a_router_that_samples_recomputes_what_it_drew():
    """Rows that phimoe's live router drew in training are the same in the recomputation."""
    grads = []
    for use_reentrant in (None, False):
        model = trained("phimoe", use_reentrant).train()
        session = RouteSession(model)
        routes = foreign_ids(session.schema, NUM_ROWS, 5)
        routes[3:20] = -1
        torch.manual_seed(8)
        with session.forward(routes):
            loss = loss_of(model, tokens(BATCH, LENGTH, 0))
        loss.backward()
        grads.append(gradients(model))
    assert largest_difference(*grads) == 0.0


@pytest.mark.parametrize("name", SERVED)
def test_foreign_ids_reach_the_experts_with_live_weights(name):
    model = trained(name)
    session = RouteSession(model)
    ids_NLK = foreign_ids(session.schema, NUM_ROWS, 5)
    ids_NLK[3:7] = -1
    forced_N = ids_NLK[:, 0, 0] >= 0
    weights, recorder = [], ExpertsRecorder()
    for module in model.modules():
        if type(module).__name__.endswith("Experts") and type(module).__name__ not in NO_WEIGHTS:
            module.register_forward_pre_hook(lambda _, args: weights.append(args[2]))
    with recorder.recording(model), session.forward(ids_NLK) as forwards:
        loss = loss_of(model, tokens(BATCH, LENGTH, 0))
    seen, wanted = recorder.rows, forwards[0].topk_ids
    if name == "llama4":  # its experts see no order
        seen, wanted = seen.sort(-1).values, wanted.sort(-1).values
    assert torch.equal(seen, wanted)
    assert torch.equal(forwards[0].topk_ids[forced_N], ids_NLK[forced_N])
    assert all((layer_NK[forced_N] > 0).all() for layer_NK in weights)
    loss.backward()
    for binding in session.bindings:
        router = [p for n, p in binding.module.named_parameters() if "expert" not in n]
        assert any(p.grad is not None and p.grad.any() for p in router)


@torch.no_grad()
@pytest.mark.parametrize("name", SERVED)
def test_native_rows_take_the_live_router_s_choice(name):
    """Rows without a route choose as a router does that has seen the same hidden states: that of the first layer."""
    model = SERVED[name].build()
    session = RouteSession(model)
    input_ids = tokens(BATCH, LENGTH, 0)
    with session.recording() as native:
        logits_of(model, input_ids)
    ids_NLK = foreign_ids(session.schema, NUM_ROWS, 5)
    ids_NLK[3:7] = -1
    with session.forward(ids_NLK, keep_own=True) as forwards:
        logits_of(model, input_ids)
    assert torch.equal(forwards[0].topk_ids[3:7, 0], native[0].topk_ids[3:7, 0])
    assert torch.equal(forwards[0].own_topk_ids[:, 0], native[0].topk_ids[:, 0])
    assert torch.equal(forwards[0].own_topk_ids[3:7], forwards[0].topk_ids[3:7])
    assert forwards[0].num_native == 4


@torch.no_grad()
def test_weights_of_masked_groups_are_those_of_the_unmasked_scores():
    """deepseek_v2 zeroes the scores outside of its chosen groups; given experts there keep their weight."""
    model = SERVED["deepseek_v2"].build()
    session = RouteSession(model)
    ids_NLK = foreign_ids(session.schema, NUM_ROWS, 5)
    router = session.bindings[0].module
    outputs: list[Any] = []
    router.register_forward_hook(lambda *call: outputs.append(call[2]))
    with session.forward(ids_NLK):
        logits_of(model, tokens(BATCH, LENGTH, 0))
    scores_NE, weights_NK, _ = outputs[0]
    expected_NK = scores_NE.softmax(-1).gather(-1, ids_NLK[:, 0]) * router.routed_scaling_factor
    assert torch.equal(weights_NK, expected_NK)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused_by_name(name):
    family = REFUSED[name]
    kind = DenseModelError if "no mixture" in family.reason else UncapturableError
    model = family.build().train()
    with pytest.raises(ModelError, match=family.reason) as caught:
        RouteSession(model)
    assert type(caught.value) is kind
    assert all(module.training for module in model.modules())
