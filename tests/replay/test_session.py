"""The life of a session: what it leaves behind, what survives it, and what it refuses."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from routebook.errors import CaptureError, ReplayError
from routebook.replay import RouteSession, record, replay
from routebook.replay.session import bound
from tests.capture.models import ToyBlock, ToyExperts, ToyRouter, toy_block, toy_model, toy_tokens
from tests.capture.recorder import ExpertsRecorder
from tests.families import SERVED
from tests.replay.helpers import (
    foreign_ids,
    gradients,
    largest_difference,
    logits_of,
    loss_of,
    tokens,
)

ROWS = 26


def build(name: str = "qwen3_moe", **checkpointing: Any) -> Any:
    model = SERVED[name].build().train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    return model


def traces(model: nn.Module) -> dict[str, Any]:
    """What a session could have left on a model."""
    return {
        path: (type(m), set(m.__dict__), len(m._forward_pre_hooks), len(m._forward_hooks))
        for path, m in model.named_modules()
    }


def test_a_closed_session_leaves_no_trace():
    model = build()
    before = traces(model)
    with RouteSessionOpen(model) as session, session.forward(foreign_ids(session.schema, ROWS, 1)):
        loss_of(model, tokens(2, 13, 0))
        assert traces(model) != before
    assert traces(model) == before
    with record(model):
        loss_of(model, tokens(2, 13, 0))
    assert traces(model) == before


class RouteSessionOpen(RouteSession):
    """A session that is closed by leaving a block."""

    def __enter__(self) -> RouteSession:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_backward_after_the_block_takes_the_routes_of_the_block(use_reentrant):
    """Two blocks, each over before its backward begins, and the second one's forward between."""
    grads = []
    for options in ({}, {"use_reentrant": use_reentrant}):
        model = build(**options)
        model.enable_input_require_grads()
        before = traces(model)
        losses = []
        for seed in (1, 2):
            routes = foreign_ids(schema_of(model), ROWS, seed)
            with replay(model, routes):
                losses.append(loss_of(model, tokens(2, 13, seed)))
        for loss in losses:
            loss.backward()
        grads.append(gradients(model))
        del loss, losses
        gc.collect()
        native = logits_of(model, tokens(2, 13, 5))
        assert traces(model) == before
        assert torch.equal(native, logits_of(model, tokens(2, 13, 5)))
    assert largest_difference(*grads) == 0.0


def schema_of(model: nn.Module) -> Any:
    with bound(model) as session:
        return session.schema


def test_forward_only_passes_leave_nothing_for_a_later_backward():
    grads = []
    for passes in (0, 3):
        model = build(use_reentrant=False)
        session = RouteSession(model)
        with torch.no_grad():
            for seed in range(passes):
                with session.forward(foreign_ids(session.schema, ROWS, 50 + seed)):
                    logits_of(model, tokens(2, 13, seed))
        with session.forward(foreign_ids(session.schema, ROWS, 1)):
            loss = loss_of(model, tokens(2, 13, 0))
        with torch.no_grad(), session.forward(foreign_ids(session.schema, ROWS, 7)):
            logits_of(model, tokens(2, 13, 1))
        loss.backward()
        grads.append(gradients(model))
    assert largest_difference(*grads) == 0.0


def test_native_forwards_beside_a_session_stay_native():
    plain = build(use_reentrant=False)
    loss_of(plain, tokens(2, 13, 0)).backward()
    model = build(use_reentrant=False)
    session = RouteSession(model)
    loss = loss_of(model, tokens(2, 13, 0))
    with session.forward(foreign_ids(session.schema, ROWS, 1)):
        other = loss_of(model, tokens(2, 13, 1))
    loss.backward()
    assert largest_difference(gradients(plain), gradients(model)) == 0.0
    other.backward()


def test_a_second_decoder_that_never_runs_has_no_part():
    """A model that was built twice leaves the routers of its first decoder behind, in front of the others."""
    model = toy_model(toy_block, toy_block)
    orphans = nn.ModuleList([toy_block(), toy_block()])
    layers = model._modules.pop("layers")
    model.orphans, model.layers = orphans, layers
    session = RouteSession(model)
    assert [binding.path for binding in session.bindings] == ["layers.0.router", "layers.1.router"]
    ids_NLK = foreign_ids(session.schema, 9, 1)
    recorder = ExpertsRecorder()
    with recorder.recording(model), session.forward(ids_NLK):
        model(toy_tokens(9))
    assert torch.equal(recorder.rows, ids_NLK)


def test_two_models_have_two_sessions():
    one, two = build(), build("mixtral")
    session, other = RouteSession(one), RouteSession(two)
    native = logits_of(two, tokens(2, 13, 0))
    with session.forward(foreign_ids(session.schema, ROWS, 1)) as forwards:
        logits_of(one, tokens(2, 13, 0))
        assert torch.equal(logits_of(two, tokens(2, 13, 0)), native)
    assert len(forwards) == 1
    other.close()


def test_a_copy_of_a_bound_model_is_native():
    model = build()
    native = logits_of(model, tokens(2, 13, 0))
    session = RouteSession(model)
    with session.forward(foreign_ids(session.schema, ROWS, 1)):
        clone = copy.deepcopy(model)
        routed = logits_of(model, tokens(2, 13, 0))
        assert torch.equal(logits_of(clone, tokens(2, 13, 0)), native)
    session.close()
    # The copy is a model of its own, with weights of its own.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with replay(clone, foreign_ids(session.schema, ROWS, 1)):
        assert torch.equal(logits_of(clone, tokens(2, 13, 0)), routed)
    assert torch.equal(logits_of(clone, tokens(2, 13, 0)), native)


def test_a_bound_model_is_not_bound_twice():
    model = build()
    session = RouteSession(model)
    with pytest.raises(CaptureError, match="bound already"):
        RouteSession(model)
    # `replay` takes the session that is there, and leaves it open.
    with replay(model, foreign_ids(session.schema, ROWS, 1)) as same:
        logits_of(model, tokens(2, 13, 0))
    assert same is session
    assert not session.is_closed
    session.close()
    RouteSession(model).close()


def test_a_block_without_a_forward_is_an_error():
    model = build()
    session = RouteSession(model)
    ids_NLK = foreign_ids(session.schema, ROWS, 1)
    with pytest.raises(ReplayError, match="no row was consumed"), session.forward(ids_NLK):
        pass
    with pytest.raises(ReplayError, match="no forward of the model ran"), record(model):
        pass
    another = pytest.raises(ReplayError, match="another forward of this session is open")
    with another, session.recording(), session.recording():
        pass
    session.close()
    with pytest.raises(ReplayError, match="closed"), session.recording():
        pass


class Skipping(nn.Module):
    """A layer that can pass its router by, as a fused kernel does."""

    def __init__(self, block: ToyBlock) -> None:
        super().__init__()
        self.block = block
        self.times = 1

    def forward(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            hidden_NH = self.block(hidden_NH)
        return hidden_NH


def test_a_layer_that_consumes_no_rows_or_all_of_them_twice_is_named():
    model = toy_model(toy_block, lambda: Skipping(toy_block()))
    session = RouteSession(model)
    ids_NLK = foreign_ids(session.schema, 9, 1)
    model.layers[1].times = 0
    with (
        pytest.raises(ReplayError, match=r"layers \[1\] consumed none of the 9 rows"),
        session.forward(ids_NLK),
    ):
        model(toy_tokens(9))
    model.layers[1].times = 2
    with pytest.raises(ReplayError, match="layer 1 chose experts twice"), session.forward(ids_NLK):
        model(toy_tokens(9))
    # A forward that failed leaves the session as it was.
    model.layers[1].times = 1
    with session.forward(ids_NLK) as forwards:
        model(toy_tokens(9))
    assert torch.equal(forwards[0].topk_ids, ids_NLK)


class Sharded(ToyRouter):
    """A router that sees only some of the tokens."""

    rows = slice(None)

    def forward(self, hidden_NH: torch.Tensor) -> Any:
        return super().forward(hidden_NH[self.rows])


def test_a_router_that_sees_a_shard_is_refused():
    model = toy_model(lambda: ToyBlock(Sharded(16, 3), ToyExperts(16)))
    session = RouteSession(model)
    model.layers[0].router.rows = slice(0, 1)
    ids_NLK = foreign_ids(session.schema, 9, 1)
    refused = pytest.raises(ReplayError, match="layer 0 routes 1 rows in a forward of 9")
    with refused, session.forward(ids_NLK):
        model(toy_tokens(9))


class Recomputing(nn.Module):
    """A layer that checkpoints a part of itself and keeps nothing but the tensors."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, hidden_NH, use_reentrant=False)


def test_a_recomputation_that_cannot_be_told_apart_is_refused():
    model = toy_model(toy_block, lambda: Recomputing(toy_block()))
    session = RouteSession(model)
    with session.forward(foreign_ids(session.schema, 9, 1)):
        output = model(toy_tokens(9))
    with pytest.raises(ReplayError, match=r"layers\.1 \(Recomputing\) is recomputed in backward"):
        output.sum().backward()
    whole = build()
    session = RouteSession(whole)
    embeds = whole.get_input_embeddings()(tokens(2, 13, 0))
    with session.forward(foreign_ids(session.schema, ROWS, 1)):
        output = checkpoint(
            lambda embeds: whole(inputs_embeds=embeds, use_cache=False).logits,
            embeds,
            use_reentrant=False,
        )
    with pytest.raises(ReplayError, match="whole decoder"):
        output.sum().backward()


@pytest.mark.parametrize("part", ["layer", "block"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_wrappers_keep_the_routes(part, reentrant):
    """torch's own wrapper, round whole layers or only round their experts."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        checkpoint_wrapper,
    )

    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    grads = []
    for wrap in (False, True):
        model = build()
        model.enable_input_require_grads()
        for index, layer in enumerate(model.model.layers):
            if wrap and part == "layer":
                model.model.layers[index] = checkpoint_wrapper(layer, checkpoint_impl=impl)
            elif wrap:
                layer.mlp = checkpoint_wrapper(layer.mlp, checkpoint_impl=impl)
        session = RouteSession(model)
        losses = []
        for seed in (1, 2):
            routes = foreign_ids(session.schema, ROWS, seed)
            routes[4:9] = -1
            with session.forward(routes):
                losses.append(loss_of(model, tokens(2, 13, seed)))
        for loss in losses:
            loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_recorded_rows_can_be_replayed_by_another_dtype():
    """R2 and R3 in one: what one model took, another takes."""
    model = build().eval()
    other = SERVED["qwen3_moe"].build(torch.bfloat16)
    with torch.no_grad():
        with record(other) as recorded:
            logits_of(other, tokens(2, 13, 0))
        recorder = ExpertsRecorder()
        with replay(model, recorded[0].records()), recorder.recording(model):
            logits_of(model, tokens(2, 13, 0))
    assert torch.equal(recorder.rows, recorded[0].topk_ids)


def test_expert_counts_are_those_that_ran():
    model = build()
    with record(model) as forwards:
        logits_of(model, tokens(2, 13, 0))
    forward = forwards[0]
    for layer_E, ids_NK in zip(forward.expert_counts(), forward.topk_ids.unbind(1), strict=True):
        expected = [int((ids_NK == expert).sum()) for expert in range(12)]
        assert layer_E.tolist() == expected


def test_embeddings_without_tokens_are_replayed_by_ids_and_have_no_record():
    model = build()
    embeds = model.get_input_embeddings()(tokens(2, 13, 0))
    with record(model) as forwards:
        model(inputs_embeds=embeds, use_cache=False)
    with pytest.raises(ReplayError, match="given embeddings"):
        forwards[0].records()
    with replay(model, forwards[0].topk_ids), record_of_experts(model) as recorder:
        model(inputs_embeds=embeds, use_cache=False)
    assert torch.equal(recorder.rows, forwards[0].topk_ids)


def record_of_experts(model: nn.Module) -> Any:
    from contextlib import contextmanager

    @contextmanager
    def watch():
        recorder = ExpertsRecorder()
        with recorder.recording(model):
            yield recorder

    return watch()
