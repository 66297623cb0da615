"""Replay brings the trainer's probabilities to the engine's, and what is logged says so.

The engine's own log-probabilities are the oracle: its paged forward shares no code with replay.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from routebook import LLM, SamplingParams
from routebook.routes import RoutedExperts
from tests.replay.trl.runs import (
    SCHEMA,
    EngineRollouts,
    ReplayConfig,
    Scripted,
    foreign_rows,
    logged,
    make,
)


class ForcedPrompts:
    """The embedded engine in float32, made to route each prompt along rows that no router chose.

    Number format and weights are the trainer's, so that routing is all that differs.
    """

    def __init__(self) -> None:
        self.llm = LLM("tiny", dtype="float32")
        self._generator = np.random.default_rng(0)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        self.llm.update_weights(trainer.model.state_dict())
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        forced = [
            RoutedExperts.from_rows(SCHEMA, foreign_rows(len(ids), self._generator), ids)
            for ids in prompt_ids
        ]
        params = [
            SamplingParams(max_tokens=16, seed=seed, logprobs=0) for seed in range(len(prompts))
        ]
        outputs = self.llm.generate(prompt_ids, params, records=forced, forced=True)
        choices = [output.choices[0] for output in outputs]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [list(choice.token_ids) for choice in choices],
            "logprobs": [[token.logprob for token in choice.logprobs] for choice in choices],
            "routed_experts": [choice.routed_experts for choice in choices],
        }


@pytest.mark.parametrize("steps_per_generation", [1, 2])
def test_where_routing_alone_differs_ratios_are_one_with_replay(steps_per_generation, tmp_path):
    """Both where the gap is that of the loss, and where it is that of the old log-probabilities."""
    args = {"max_completion_length": 16, "steps_per_generation": steps_per_generation}
    trainer = make(tmp_path, ForcedPrompts(), ReplayConfig(native_every=1), **args)
    trainer.train()
    assert max(logged(trainer, "replay/gap/max")) < 1e-4
    assert logged(trainer, "replay/gap/extreme")[0] == 0
    assert min(logged(trainer, "replay/native_gap/max")) > 1
    assert min(logged(trainer, "replay/native_gap/extreme")) > 0.05
    baseline = make(tmp_path, ForcedPrompts(), ReplayConfig(enabled=False, native_every=1), **args)
    baseline.train()
    for name in ("kl", "mean", "max", "extreme"):
        native, own = (logged(baseline, f"replay/{kind}/{name}") for kind in ("native_gap", "gap"))
        assert native == pytest.approx(own, rel=1e-3)
    assert min(logged(baseline, "replay/gap/max")) > 1
    assert not logged(baseline, "replay/sequences")


def test_an_engine_in_bfloat16_is_nearer_with_replay(tmp_path):
    rollouts = EngineRollouts(LLM("tiny", dtype="bfloat16"))
    trainer = make(
        tmp_path,
        rollouts,
        ReplayConfig(native_every=1),
        max_completion_length=64,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=1,
    )
    trainer.train()
    (kl,), (native_kl,) = logged(trainer, "replay/gap/kl"), logged(trainer, "replay/native_gap/kl")
    (most,), (native_most,) = (
        logged(trainer, f"replay/{kind}/max") for kind in ("gap", "native_gap")
    )
    assert 0 < kl < native_kl / 2
    assert most < native_most / 3


def test_gaps_are_those_of_a_plain_computation(tmp_path):
    """The made-up log-probabilities are all -1, so the gap of a token is its own log-probability plus one."""
    replay = ReplayConfig(extreme_ratio=float(np.exp(9)))
    trainer = make(tmp_path, Scripted(), replay, max_steps=1, gradient_accumulation_steps=4)
    seen = []
    plain = trainer._compute_loss

    def watch(model: Any, inputs: dict[str, Any]) -> Any:
        loss = plain(model, inputs)
        tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        records = [trainer._books["train"].rollouts[i].record for i in inputs["rollout_number"]]
        with torch.no_grad(), trainer.session.forward(records):
            logits = model(input_ids=tokens, attention_mask=mask).logits[:, :-1]
        logps = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        keep = inputs["completion_ids"].shape[1]
        seen.append(logps[:, -keep:][inputs["completion_mask"].bool()])
        return loss

    trainer._compute_loss = watch
    trainer.train()
    assert (seen[-1] + 1).abs().max() < max((one + 1).abs().max() for one in seen)
    gaps = (torch.cat(seen) + 1).double()
    expected = {
        "kl": (gaps.exp() - 1 - gaps).mean(),
        "mean": gaps.abs().mean(),
        "max": gaps.abs().max(),
        "extreme": (gaps.abs() > 9).double().mean(),
    }
    for name, value in expected.items():
        assert logged(trainer, f"replay/gap/{name}") == [pytest.approx(value.item(), rel=1e-4)]
    assert 0 < expected["extreme"] < 1
