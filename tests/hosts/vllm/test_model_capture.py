"""The worker's side without vLLM: layers that are made up, bound and written by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from routebook.errors import CaptureError, DenseModelError
from routebook.hosts.vllm.message import attach, attached
from routebook.hosts.vllm.model_capture import ModelCapture, Stages


class FakeRelease:
    """Layers of these decoder layers, experts and top-k."""

    def __init__(self, *layers: tuple[int, int, int]) -> None:
        self.layers = layers
        self.writes: dict[str, Any] = {}

    def moe_layers(self, model: nn.Module) -> Any:
        for layer, experts, top_k in self.layers:
            sizes = SimpleNamespace(num_logical_experts=experts, experts_per_token=top_k)
            yield f"layers.{layer}.mlp", layer, SimpleNamespace(moe_config=sizes)

    def bind(self, path: str, module: Any, write: Any) -> None:
        self.writes[path] = write


def capture(release: FakeRelease, *, answers: bool = True) -> ModelCapture:
    return ModelCapture(
        nn.Linear(1, 1),
        release,
        num_hidden_layers=4,
        max_tokens=8,
        stages=Stages([0], 0, None),
        answers=answers,
    )


def step(captured: ModelCapture, release: FakeRelease, *ids: list[list[int]]) -> Any:
    """Run a step in which the first layers choose these experts."""
    captured.begin(len(ids[0]))
    for write, ids_NK in zip(release.writes.values(), ids, strict=False):
        write(torch.tensor(ids_NK))
    return captured.end(len(ids[0]))


def test_a_message_has_the_layers_that_have_experts_and_the_dtype_of_the_model():
    release = FakeRelease((1, 300, 2), (3, 300, 2))
    message = step(capture(release), release, [[299, 0], [5, 6]], [[255, 256], [7, 8]])
    assert message.schema.layer_ids == (1, 3)
    assert message.ids_TLK.dtype.name == "uint16"
    assert message.ids_TLK.tolist() == [[[299, 0], [255, 256]], [[5, 6], [7, 8]]]


def test_a_message_is_not_changed_by_the_next_step():
    release = FakeRelease((0, 8, 2))
    captured = capture(release)
    first = step(captured, release, [[1, 2]])
    step(captured, release, [[3, 4]])
    assert first.ids_TLK.tolist() == [[[1, 2]]]


def test_rows_of_padding_are_not_taken():
    release = FakeRelease((0, 8, 2))
    captured = capture(release)
    captured.begin(1)
    release.writes["layers.0.mlp"](torch.tensor([[1, 2], [3, 4], [5, 6]]))
    assert captured.end(1).ids_TLK.tolist() == [[[1, 2]]]


def test_a_router_that_did_not_write_ends_the_start_and_later_costs_one_step(caplog):
    release = FakeRelease((0, 8, 2), (2, 8, 2))
    captured = capture(release)
    with pytest.raises(CaptureError, match=r"layers \[2\]"):
        step(captured, release, [[1, 2]])
    assert step(captured, release, [[1, 2]], [[3, 4]]) is not None
    # What the step before left in the buffer does not pass for this one's.
    assert step(captured, release, [[1, 2]]) is None
    assert "layers [2]" in caplog.text
    assert step(captured, release, [[1, 2]], [[3, 4]]) is not None


def test_an_id_that_no_expert_has_is_not_sent():
    release = FakeRelease((0, 8, 2))
    with pytest.raises(CaptureError, match=r"layers \[0\]"):
        step(capture(release), release, [[1, 8]])


def test_workers_that_do_not_answer_say_nothing():
    release = FakeRelease((0, 8, 2))
    assert step(capture(release, answers=False), release, [[1, 2]]) is None


def test_models_that_do_not_fit_one_record_are_refused():
    with pytest.raises(DenseModelError):
        capture(FakeRelease())
    with pytest.raises(CaptureError, match="do not fit"):
        capture(FakeRelease((0, 8, 2), (1, 16, 2)))


def test_an_output_carries_its_own_rows():
    release = FakeRelease((0, 8, 2))
    message = step(capture(release), release, [[1, 2]])
    output, other = SimpleNamespace(), SimpleNamespace()
    attach(output, message)
    assert attached(output) is message
    assert attached(other) is None
