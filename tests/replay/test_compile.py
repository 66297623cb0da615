"""Replay under `torch.compile`: the same loss and gradients as without it.

The experts run by `batched_mm`, the one implementation on a CPU that compiles in float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from routebook.replay import RouteSession
from tests.families import SERVED
from tests.replay.helpers import foreign_ids, gradients, largest_difference, loss_of, tokens

ROWS = 26
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about graph breaks


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(checkpointed: bool) -> Any:
    model = SERVED["qwen3_moe"].build().train()
    model.set_experts_implementation("batched_mm")
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def run(model: Any, called: Any, session: RouteSession) -> dict[str, torch.Tensor]:
    """Gradients of two interleaved micro-batches along foreign ids, some rows native."""
    losses = []
    for seed in (1, 2):
        routes = foreign_ids(session.schema, ROWS, seed)
        routes[4 * seed : 9] = -1
        with session.forward(routes) as forwards:
            losses.append(loss_of(called, tokens(2, 13, seed)))
        forced_N = routes[:, 0, 0] >= 0
        assert torch.equal(forwards[0].topk_ids[forced_N], routes[forced_N])
    for loss in losses:
        loss.backward()
    return gradients(model)


@pytest.mark.parametrize(
    ("compiled", "checkpointed"),
    [("layers", False), ("layers", True), ("whole", True), ("in place", False)],
)
def test_a_compiled_model_takes_its_routes(compiled, checkpointed):
    plain = build(checkpointed)
    expected = run(plain, plain, RouteSession(plain))
    model = build(checkpointed)
    called: Any = model
    session = RouteSession(model)
    if compiled == "layers":
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    elif compiled == "whole":
        called = torch.compile(model, backend="aot_eager")
    else:
        model.compile(backend="aot_eager")
    assert largest_difference(expected, run(model, called, session)) == 0.0
    # A second time, with nothing left to compile.
    assert largest_difference(expected, run(model, called, session)) == 0.0


def test_a_model_that_was_compiled_before_takes_its_routes_and_is_native_again():
    plain = build(False)
    native = loss_of(plain, tokens(2, 13, 0))
    expected = run(plain, plain, RouteSession(plain))
    model = build(False)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert torch.equal(loss_of(model, tokens(2, 13, 0)), native)
    session = RouteSession(model)
    assert largest_difference(expected, run(model, model, session)) == 0.0
    session.close()
    assert torch.equal(loss_of(model, tokens(2, 13, 0)), native)


def test_one_graph_for_the_whole_model_is_refused_by_the_compiler():
    """The beginning of a forward, where the routes are placed, is no part of a graph."""
    model = build(False)
    session = RouteSession(model)
    called = torch.compile(model, backend="aot_eager", fullgraph=True)
    refused = pytest.raises(torch._dynamo.exc.Unsupported, match="compile the layers, or")
    with refused, session.forward(foreign_ids(session.schema, ROWS, 1)):
        loss_of(called, tokens(2, 13, 1))
