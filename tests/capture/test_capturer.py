"""Capture around forward passes: arming, isolation, compilation, replay through the same seam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from routebook.capture.capturer import Capturer
from routebook.capture.forcing import Switch
from routebook.capture.interception import ExpertTopK, RouterTap, under_mode
from routebook.errors import CaptureError
from tests.capture.models import (
    ToyBlock,
    ToyDense,
    ToyRouter,
    cloning_block,
    toy_block,
    toy_model,
    toy_tokens,
)
from tests.capture.recorder import ExpertsRecorder

pytestmark = pytest.mark.usefixtures("no_grad")
both_ways = pytest.mark.parametrize(
    "moe", [pytest.param(toy_block, id="output"), pytest.param(cloning_block, id="top-k")]
)
Moe = Callable[[], nn.Module]


@pytest.fixture
def no_grad() -> Any:
    with torch.no_grad():
        yield


@both_ways
def test_each_forward_gives_its_own_rows(moe: Moe) -> None:
    model = toy_model(moe, ToyDense, moe)
    capturer = Capturer.bind(model, 16)
    for num_tokens in (16, 1, 7, 16):
        recorder = ExpertsRecorder()
        with recorder.recording(model), capturer.armed(num_tokens):
            model(input_ids=toy_tokens(num_tokens))
        assert torch.equal(capturer.snapshot().ids_TLK.long(), recorder.rows)


@both_ways
def test_a_forward_that_is_not_armed_leaves_the_rows_alone(moe: Moe) -> None:
    model = toy_model(moe)
    capturer = Capturer.bind(model, 16)
    recorder = ExpertsRecorder()
    with recorder.recording(model), capturer.armed(5):
        model(input_ids=toy_tokens(5))
    model(input_ids=toy_tokens(9))
    assert torch.equal(capturer.snapshot().ids_TLK.long(), recorder.rows)


@pytest.mark.parametrize(("moe", "armed_depth"), [(toy_block, 0), (cloning_block, 1)])
def test_a_mode_runs_only_where_and_while_it_is_needed(moe: Moe, armed_depth: int) -> None:
    model = toy_model(moe)
    capturer = Capturer.bind(model, 16)
    depths: list[int] = []

    def spy(module: nn.Module, args: Any) -> None:
        depths.append(torch._C._len_torch_function_stack())

    model.layers[0].router.gate.register_forward_pre_hook(spy)
    model(input_ids=toy_tokens(5))
    with capturer.armed(5):
        model(input_ids=toy_tokens(5))
    assert depths == [0, armed_depth]


@both_ways
def test_a_forward_of_another_size_is_refused(moe: Moe) -> None:
    model = toy_model(moe)
    capturer = Capturer.bind(model, 16)
    with pytest.raises(CaptureError, match="of 6 tokens"), capturer.armed(6):
        model(input_ids=toy_tokens(5))
    with pytest.raises(CaptureError, match="did not capture"):
        capturer.snapshot()
    model(input_ids=toy_tokens(5))  # disarmed again


@both_ways
def test_two_forwards_in_one_armed_block_are_refused(moe: Moe) -> None:
    model = toy_model(moe)
    capturer = Capturer.bind(model, 16)
    with capturer.armed(5):
        model(input_ids=toy_tokens(5))
        with pytest.raises(CaptureError, match="layer 0 captured twice"):
            model(input_ids=toy_tokens(5))


def test_more_tokens_than_bound_for() -> None:
    capturer = Capturer.bind(toy_model(toy_block), 4)
    with pytest.raises(CaptureError, match="5 tokens does not fit"), capturer.armed(5):
        pass


def test_binding_twice_is_refused_until_unbound() -> None:
    model = toy_model(toy_block, toy_block)
    capturer = Capturer.bind(model, 4)
    with pytest.raises(CaptureError, match=r"layers\.0\.router \(ToyRouter\) is bound already"):
        Capturer.bind(model, 4)
    capturer.unbind()
    capturer.unbind()
    Capturer.bind(model, 4).unbind()


def test_unbinding_gives_back_a_forward_that_was_set_before() -> None:
    model = toy_model(toy_block)
    router = model.layers[0].router
    original = router.forward

    def mine(hidden_NH: torch.Tensor) -> Any:
        return original(hidden_NH)

    router.forward = mine
    capturer = Capturer.bind(model, 8)
    with capturer.armed(3):
        model(input_ids=toy_tokens(3))
    assert capturer.snapshot().ids_TLK.shape == (3, 1, 3)
    capturer.unbind()
    assert router.__dict__["forward"] is mine


def test_unbinding_below_another_replacement_is_refused() -> None:
    model = toy_model(toy_block)
    capturer = Capturer.bind(model, 8)
    router = model.layers[0].router
    router.forward = lambda hidden_NH: None
    with pytest.raises(CaptureError, match="forward of ToyRouter was replaced after"):
        capturer.unbind()


@both_ways
def test_compiled_without_a_graph_break(moe: Moe) -> None:
    model = toy_model(moe, ToyDense, moe)
    capturer = Capturer.bind(model, 16)
    eager: list[torch.Tensor] = []
    for num_tokens in (9, 12):
        with capturer.armed(num_tokens):
            model(input_ids=toy_tokens(num_tokens))
        eager.append(capturer.snapshot().ids_TLK)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(input_ids=toy_tokens(9))  # a graph without the capture must not serve an armed forward
    for num_tokens, expected in zip((9, 12), eager, strict=True):
        with capturer.armed(num_tokens):
            compiled(input_ids=toy_tokens(num_tokens))
        assert torch.equal(capturer.snapshot().ids_TLK, expected)


def test_only_the_expert_top_k_reaches_the_handler() -> None:
    seen: list[tuple[int, ...]] = []

    def handler(scores_NE: torch.Tensor, choose: Callable[[], Any]) -> Any:
        seen.append(tuple(scores_NE.shape))
        return choose()

    with ExpertTopK(6, handler):
        torch.randn(4, 6).topk(2)
        torch.topk(torch.randn(5, 6), 2, dim=1)
        torch.topk(input=torch.randn(3, 6), k=2)
        torch.randn(4, 5).topk(2)
        torch.randn(6, 6).topk(2, dim=0)
        torch.randn(2, 4, 6).topk(2)
        torch.randn(6).topk(2)
    assert seen == [(4, 6), (5, 6), (3, 6)]


def test_a_handler_can_answer_the_choice() -> None:
    """The same seam steers a router: given ids, live scores, the model's own code behind it."""
    model = toy_model(toy_block)
    block = model.layers[0]
    assert isinstance(block, ToyBlock)
    assert isinstance(block.router, ToyRouter)
    input_ids = toy_tokens(10)
    plain = model(input_ids=input_ids)
    own_NK, _ = block.router(model.embed(input_ids)[0])
    answer = own_NK

    def replay(scores_NE: torch.Tensor, choose: Callable[[], Any]) -> Any:
        return scores_NE.gather(-1, answer), answer

    switch = Switch(on=True)
    tap = RouterTap(block.router, switch, under_mode(ExpertTopK(16, replay)))
    assert torch.equal(model(input_ids=input_ids), plain)
    answer = (own_NK + 5) % 16
    recorder = ExpertsRecorder()
    with recorder.recording(model):
        steered = model(input_ids=input_ids)
    assert torch.equal(recorder.rows[:, 0], answer)
    assert not torch.equal(steered, plain)
    tap.remove()
    assert torch.equal(model(input_ids=input_ids), plain)
