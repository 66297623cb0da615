"""One training run: rollouts by the embedded engine in bfloat16, updates by TRL in float32."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from examples.grpo_arithmetic.drift import Drift, present_drift
from examples.grpo_arithmetic.optimizer import MasterWeightsAdamW
from examples.grpo_arithmetic.settings import Settings
from examples.grpo_arithmetic.task import MAX_TOKENS, prompts, rewards
from routebook import LLM
from routebook.replay.trl import EngineRollouts, R3GRPOTrainer, ReplayConfig


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """How far the trainer's probabilities of a step's sampled tokens are from the engine's, before the update."""

    kl: float
    """Mean of exp(d) - 1 - d, with d the trainer's less the engine's log-probability, nats."""
    mean: float
    """Mean of the absolute d, nats."""
    max: float
    extreme: float
    """Share of tokens whose ratio of probabilities is beyond 2 or below 1/2."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step saw."""

    step: int
    reward: float
    entropy: float
    """Mean entropy of the trainer's distributions over the sampled tokens, nats."""
    grad_norm: float
    gap: Gap
    """As the run trains: replayed with R3, native without."""
    native_gap: Gap | None
    """With R3: what the live routers would have given for the same tokens and weights."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One seed, with or without R3."""

    seed: int
    replays: bool
    seconds: float
    cpu_seconds: float
    drift: Drift
    """With the weights at its end."""
    steps: list[Step]


def train(settings: Settings, start: Path, seed: int, *, replays: bool) -> Run:
    """Train a model by GRPO.

    Args:
        settings: of the comparison.
        start: folder of the model, in bfloat16, and its tokenizer.
        seed: of prompts and sampling.
        replays: with R3, or natively.

    Raises:
        RoutebookError: what the trainer, the engine or the replay refuse.
    """
    begun, cpu_begun = time.perf_counter(), time.process_time()
    llm = LLM(str(start), dtype="bfloat16", device=settings.device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(settings, start, seed, llm, folder, replays=replays)
        trainer.train()
        drift = present_drift(trainer.model, llm, start, seed)
    steps = [_step(entry) for entry in trainer.state.log_history if "reward" in entry]
    return Run(
        seed=seed,
        replays=replays,
        seconds=time.perf_counter() - begun,
        cpu_seconds=time.process_time() - cpu_begun,
        drift=drift,
        steps=steps,
    )


def make_trainer(
    settings: Settings, start: Path, seed: int, llm: LLM, folder: str, *, replays: bool
) -> R3GRPOTrainer:
    """The trainer of one run; `folder` holds what TRL writes."""
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).to(settings.device)
    optimizer = MasterWeightsAdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    num_prompts = settings.steps * settings.prompts_per_step
    return R3GRPOTrainer(
        model,
        rewards,
        args=_grpo_config(settings, seed, folder),
        train_dataset=Dataset.from_dict({"prompt": prompts(num_prompts, seed)}),
        processing_class=AutoTokenizer.from_pretrained(start),
        optimizers=(optimizer, None),
        rollout_func=EngineRollouts(llm),
        # The second pass shows what the live routers would do, and changes nothing.
        replay=ReplayConfig(enabled=replays, native_every=1 if replays else 0),
    )


def _grpo_config(settings: Settings, seed: int, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        seed=seed,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.prompts_per_step * settings.completions_per_prompt,
        num_generations=settings.completions_per_prompt,
        num_iterations=settings.num_iterations,
        max_completion_length=MAX_TOKENS,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,
        logging_steps=1,
        use_cpu=settings.device == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        log_completions=False,
    )


def _step(entry: dict[str, Any]) -> Step:
    native = "replay/native_gap/kl" in entry
    return Step(
        step=entry["step"],
        reward=entry["reward"],
        entropy=entry["entropy"],
        grad_norm=entry["grad_norm"],
        gap=_gap(entry, "gap"),
        native_gap=_gap(entry, "native_gap") if native else None,
    )


def _gap(entry: dict[str, Any], name: str) -> Gap:
    return Gap(**{key: entry[f"replay/{name}/{key}"] for key in ("kl", "mean", "max", "extreme")})
