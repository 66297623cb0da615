"""A model that is given from memory is its owner's again after a shutdown, and after a start that failed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from routebook.engine.llm import LLM
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import ConfigError, WorkerError
from tests.families import SERVED

OPTIONS: dict[str, Any] = {"device": "cpu", "block_size": 4, "num_blocks": 32}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [7, 3, 11, 5, 19, 2]


@torch.no_grad()
def forward(model: nn.Module) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([PROMPT])).logits
    return logits


def settings_of(model: Any) -> list[Any]:
    """What a config says about implementations, and every method that lies in an instance."""
    configs = [model.config]
    configs += [getattr(model.config, name) for name in model.config.sub_configs]
    replaced = [(name, "forward" in vars(module)) for name, module in model.named_modules()]
    return [
        [(c._attn_implementation, c._experts_implementation) for c in configs],
        replaced,
    ]


# A plain one, one with a config in its config, one whose router has no top-k, one with recurrent layers.
@pytest.mark.parametrize("family", ["qwen3_moe", "dbrx", "phimoe", "qwen3_next"])
@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_a_model_in_memory_is_given_back(family: str, executor: str) -> None:
    model: Any = SERVED[family].build().eval()
    before, settings = forward(model), settings_of(model)
    llm = LLM(model, executor=executor, **OPTIONS)
    (first,) = llm.generate([PROMPT], PARAMS)
    assert settings_of(model) != settings
    llm.shutdown()
    assert settings_of(model) == settings
    assert torch.equal(forward(model), before)
    llm.shutdown()

    other = LLM(model, executor=executor, **OPTIONS)
    (second,) = other.generate([PROMPT], PARAMS)
    assert second.choices[0].token_ids == first.choices[0].token_ids
    assert second.choices[0].routed_experts == first.choices[0].routed_experts
    other.shutdown()
    assert torch.equal(forward(model), before)


def test_a_restart_takes_the_model_again_with_the_weights_that_it_has_by_then() -> None:
    model: Any = SERVED["qwen3_moe"].build().eval()
    llm = LLM(model, **OPTIONS)
    (first,) = llm.generate([PROMPT], PARAMS)
    llm.shutdown()
    with pytest.raises(WorkerError, match="was shut down"):
        llm.generate([PROMPT], PARAMS)
    assert llm.restart() == 0
    (again,) = llm.generate([PROMPT], PARAMS)
    assert again.choices[0].routed_experts == first.choices[0].routed_experts
    llm.shutdown()
    # The owner trains it meanwhile.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.set_attn_implementation("eager")
    assert llm.restart() == 1
    (trained,) = llm.generate([PROMPT], PARAMS)
    record, old = trained.choices[0].routed_experts, first.choices[0].routed_experts
    assert record is not None
    assert old is not None
    assert {span.weight_version for span in record.provenance} == {1}
    assert (record.ids_TLK != old.ids_TLK).any()
    llm.shutdown()
    assert model.config._attn_implementation == "eager"


def test_a_named_model_is_loaded_once_and_keeps_its_weights() -> None:
    llm = LLM("tiny", dtype="float32", **OPTIONS)
    before = llm.fingerprint
    (first,) = llm.generate(["17+25="], PARAMS)
    assert llm.restart() == 0
    assert (llm.engine.served.name, llm.fingerprint) == ("tiny", before)
    (second,) = llm.generate(["17+25="], PARAMS)
    assert second.choices[0].text == first.choices[0].text
    assert first.choices[0].routed_experts is not None
    assert second.choices[0].routed_experts is not None
    np.testing.assert_array_equal(
        second.choices[0].routed_experts.ids_TLK, first.choices[0].routed_experts.ids_TLK
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_model_len": 10**6},  # known once the model is bound
        {"max_model_len": 200},  # known once the pool is sized
    ],
)
def test_a_start_that_fails_gives_the_model_back(wrong: dict[str, Any]) -> None:
    model: Any = SERVED["qwen3_moe"].build().eval()
    before, settings = forward(model), settings_of(model)
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(model, **OPTIONS, **wrong)
    assert settings_of(model) == settings
    assert torch.equal(forward(model), before)
    LLM(model, **OPTIONS).shutdown()
