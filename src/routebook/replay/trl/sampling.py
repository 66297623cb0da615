"""What a trainer asks an engine for, and what its rollout functions give back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from routebook import SamplingParams
from routebook.errors import ConfigError, ReplayError
from routebook.routes import RoutedExperts

ROUTES = "routed_experts"
"""Key under which a rollout function gives its records."""
VERSION = "weight_version"
"""Key under which it may tell the version of the weights that ran; then every row must be of it."""

_MOST_SEEDS = 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One completion, whichever engine made it."""

    token_ids: Sequence[int]
    logprobs: list[float | None] | None
    """Of the sampled tokens, under the unmodified logits."""
    routed_experts: RoutedExperts | None
    finish_reason: str


def tokenized(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """Token ids of texts or conversations, by the trainer's own tokenizer and chat template.

    Raises:
        ConfigError: a prompt has images.
    """
    prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
    if images is not None:
        raise ConfigError("prompts with images have no rollouts with routes; give a rollout_func")
    return [list(ids) for ids in prompt_ids]


def sampling_params(trainer: Any, count: int, calls: int) -> list[SamplingParams]:
    """Sampling options of the trainer's config, with a seed of its own for each prompt.

    Seeds follow from the config's seed, the process, the step and the call, so that no two processes sample alike.

    Args:
        trainer: an :class:`R3GRPOTrainer`.
        count: number of prompts.
        calls: how often the source has been asked before.

    Raises:
        ConfigError: an option that the engine does not have.
    """
    _refuse_unknown(trainer.args)
    place = (trainer.args.seed, trainer.accelerator.process_index, trainer.state.global_step, calls)
    seeds = np.random.default_rng(place).integers(_MOST_SEEDS, size=count)
    return [
        SamplingParams(
            max_tokens=trainer.max_completion_length,
            temperature=trainer.temperature,
            top_k=max(0, trainer.top_k or 0),
            top_p=trainer.top_p,
            min_p=trainer.min_p or 0.0,
            stop_token_ids=tuple(trainer.eos_token_ids),
            seed=int(seed),
            logprobs=0 if trainer.temperature == 1 else None,
            routed_experts=trainer.replay.enabled,
        )
        for seed in seeds
    ]


def rollout_output(
    prompt_ids: list[list[int]], completions: Iterable[Completion], version: int | None
) -> dict[str, Any]:
    """What a rollout function returns.

    Raises:
        ReplayError: a completion did not come to its end.
    """
    whole = list(completions)
    for number, completion in enumerate(whole):
        _check_end(number, completion)
    has_logprobs = all(completion.logprobs is not None for completion in whole)
    output: dict[str, Any] = {
        "prompt_ids": prompt_ids,
        "completion_ids": [list(completion.token_ids) for completion in whole],
        "logprobs": [completion.logprobs for completion in whole] if has_logprobs else None,
        ROUTES: [completion.routed_experts for completion in whole],
    }
    return output if version is None else {**output, VERSION: version}


def _check_end(number: int, completion: Completion) -> None:
    if completion.finish_reason not in ("stop", "length") or not completion.token_ids:
        raise ReplayError(
            f"completion {number} ended with {completion.finish_reason!r} after {len(completion.token_ids)} tokens; "
            "what was not finished is not trained on"
        )


def check_versions(records: Iterable[RoutedExperts | None], version: int) -> None:
    """Refuse rows that other weights computed than those that a generation says it ran with.

    Raises:
        ReplayError: naming the completion and the versions.
    """
    for number, record in enumerate(records):
        spans = () if record is None else record.provenance
        others = {span.weight_version for span in spans} - {version}
        if others:
            raise ReplayError(
                f"completion {number} has rows of weight versions {sorted(others)}, but the trainer's weights are "
                f"version {version}; somebody else changes the weights, or keeps prefixes of old ones"
            )


def _refuse_unknown(args: Any) -> None:
    if args.repetition_penalty != 1:
        raise ConfigError(
            f"repetition_penalty={args.repetition_penalty} is unknown to the engine; leave it at 1.0, or give a "
            "rollout_func of your own"
        )
    if args.generation_kwargs:
        raise ConfigError(
            f"generation_kwargs={args.generation_kwargs} are options of model.generate; drop them, or give a "
            "rollout_func of your own"
        )
