"""Capture on a tiny model of every family, against a recorder that intercepts nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from routebook.capture.capturer import Capturer
from routebook.errors import CaptureError, DenseModelError, ModelError, UncapturableError
from tests.capture.recorder import ExpertsRecorder
from tests.families import REFUSED, SERVED, VOCAB_SIZE

NUM_TOKENS = 29


def tokens(num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(0, VOCAB_SIZE, (1, num_tokens), generator=generator)


def forwards(model: nn.Module) -> dict[str, Any]:
    """What each module of a model has set in the instance, and which forward it would run."""
    return {
        name: (dict(module.__dict__), module.forward.__func__)  # type: ignore[attr-defined]
        for name, module in model.named_modules()
    }


@torch.no_grad()
@pytest.mark.parametrize("name", SERVED)
def test_captured_ids_are_those_the_experts_ran_with(name: str) -> None:
    model = SERVED[name].build()
    before = forwards(model)
    input_ids = tokens(NUM_TOKENS)
    plain = model(input_ids=input_ids, use_cache=False).logits
    capturer = Capturer.bind(model, NUM_TOKENS)
    unarmed = model(input_ids=input_ids, use_cache=False).logits
    recorder = ExpertsRecorder()
    with recorder.recording(model), capturer.armed(NUM_TOKENS):
        armed = model(input_ids=input_ids, use_cache=False).logits
    captured_NLK = capturer.snapshot().ids_TLK
    capturer.unbind()

    assert captured_NLK.dtype == torch.uint8
    assert torch.equal(captured_NLK.long(), recorder.rows)
    assert captured_NLK.shape == capturer.schema.shape(NUM_TOKENS)
    assert torch.equal(plain, armed)
    assert torch.equal(plain, unarmed)
    assert forwards(model) == before
    # A model in which all tokens choose alike could hide a shifted row.
    for layer_NK in captured_NLK.unbind(1):
        assert len(layer_NK.unique(dim=0)) > NUM_TOKENS // 4


@pytest.mark.parametrize("name", SERVED)
def test_the_schema_says_what_the_modules_hold(name: str) -> None:
    model = SERVED[name].build()
    schema = Capturer.bind(model, 1).schema
    layers = model.get_submodule("transformer.blocks" if name == "dbrx" else "model.layers")
    sparse = [
        index
        for index, layer in enumerate(layers)
        if any("Experts" in type(module).__name__ for module in layer.modules())
    ]
    assert schema.layer_ids == tuple(sparse)
    assert schema.num_hidden_layers == len(layers)
    options = SERVED[name].options
    if name == "dbrx":
        options = options["ffn_config"]
    counts = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
    (num_experts,) = (options[key] for key in counts & options.keys())
    picks = {"num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"}
    (top_k,) = (options[key] for key in picks & options.keys())
    assert schema.num_experts == num_experts + options.get("zero_expert_num", 0)
    assert schema.top_k == top_k


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_reason(name: str) -> None:
    family = REFUSED[name]
    kind = DenseModelError if "no mixture" in family.reason else UncapturableError
    with pytest.raises(ModelError, match=family.reason) as caught:
        Capturer.bind(family.build(), 8)
    assert type(caught.value) is kind


def test_hash_routing_is_refused_by_name() -> None:
    """The same family without its indexer layers still routes its first layer by a hash of the token."""
    family = REFUSED["deepseek_v4"]
    options = family.options | {"layer_types": ["sliding_attention"] * 3}
    model = type(family)(name="hash", config_class=family.config_class, options=options).build()
    with pytest.raises(UncapturableError, match=r"model\.layers\.0\.mlp\.experts \(DeepseekV4Exp"):
        Capturer.bind(model, 8)


def test_phimoe_is_bound_in_eval_mode_only() -> None:
    model = SERVED["phimoe"].build().train()
    with pytest.raises(UncapturableError, match=r"PhimoeTopKRouter.*model\.eval\(\)"):
        Capturer.bind(model, 8)


def test_phimoe_refuses_a_forward_in_training_mode() -> None:
    model = SERVED["phimoe"].build()
    capturer = Capturer.bind(model, 8)
    model.train()
    with pytest.raises(CaptureError, match=r"mlp\.router samples"), capturer.armed(8):
        model(input_ids=tokens(8), use_cache=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_capture_alike(dtype: torch.dtype) -> None:
    model = SERVED["deepseek_v3"].build(dtype)
    model.set_experts_implementation("eager")
    capturer = Capturer.bind(model, NUM_TOKENS)
    recorder = ExpertsRecorder()
    with torch.no_grad(), recorder.recording(model), capturer.armed(NUM_TOKENS):
        model(input_ids=tokens(NUM_TOKENS), use_cache=False)
    assert torch.equal(capturer.snapshot().ids_TLK.long(), recorder.rows)
