"""Drift of a trainer from its engine at one moment: exact KL divergence, and how often the experts differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.grpo_arithmetic.task import MAX_TOKENS, prompts
from routebook import LLM, SamplingParams
from routebook.engine.samples import make_sample
from routebook.replay.drift import measure_drift

_NUM_PROMPTS = 100
"""About 470 sampled tokens."""
_OTHER_SEEDS = 1000


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """Trainer in float32 against the engine's number format, the same weights."""

    num_tokens: int
    """Sampled tokens."""
    different_pairs: float
    """Share of (token, layer) pairs with another set of experts than the trainer's own."""
    different_tokens: float
    kl_native: float
    """Mean KL divergence of the whole distributions, nats."""
    kl_replayed: float


def present_drift(model: Any, llm: LLM, start: Path, seed: int) -> Drift:
    """Sample with the trainer's present weights and compare.

    Args:
        model: the trainer's, float32.
        llm: the engine; it gets the model's weights.
        start: folder of the model that the training began with, and of its tokenizer.
        seed: of prompts and sampling; other ones than those of the training.
    """
    llm.update_weights(model.state_dict())
    stop = (AutoTokenizer.from_pretrained(start).eos_token_id,)
    outputs = llm.generate(
        prompts(_NUM_PROMPTS, seed + _OTHER_SEEDS),
        [
            SamplingParams(max_tokens=MAX_TOKENS, seed=number, stop_token_ids=stop)
            for number in range(_NUM_PROMPTS)
        ],
    )
    samples = [make_sample(llm, output, output.choices[0]) for output in outputs]
    rollout = AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16)
    rollout.load_state_dict(model.state_dict())
    report = measure_drift(model, samples, rollout=rollout.to(model.device))
    return Drift(
        num_tokens=report.native.num_tokens,
        different_pairs=report.different_pairs,
        different_tokens=report.different_tokens,
        kl_native=report.native.kl,
        kl_replayed=report.replayed.kl,
    )
