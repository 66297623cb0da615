"""Rollouts by the embedded engine, in the trainer's own process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from routebook.replay.trl.sampling import (
    Completion,
    rollout_output,
    sampling_params,
    tokenized,
)

if TYPE_CHECKING:
    from routebook import LLM


class EngineRollouts:
    """A rollout function: completions by an :class:`routebook.LLM`, which first gets the trainer's weights.

    Weights are handed over before the first generation and before each after which they may have changed; the engine
    casts them to its own number format. Sampling options are those of the `GRPOConfig`. With a temperature other than 1
    no log-probabilities are given, because the engine's are those of the unmodified logits: gaps are not measured then.

    Args:
        llm: an engine of the model that is trained. With several processes, each has its own.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._seen: tuple[Any, ...] | None = None
        self._version = 0
        self._calls = 0

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Complete each prompt once.

        Args:
            prompts: texts or conversations, as in the data set, each as often as it is to be completed.
            trainer: the :class:`R3GRPOTrainer` that asks.

        Returns:
            `prompt_ids`, `completion_ids`, `logprobs`, `routed_experts` and `weight_version`.

        Raises:
            ConfigError: an option of the trainer that the engine does not have.
            RequestError: a prompt is too long for the engine.
            ModelError: the trainer's weights do not fit the engine's model.
            ReplayError: a completion did not come to its end, or mixes weights.
        """
        prompt_ids = tokenized(prompts, trainer)
        params = sampling_params(trainer, len(prompt_ids), self._calls)
        self._calls += 1
        self._update(trainer)
        outputs = self.llm.generate(prompt_ids, params)
        return rollout_output(prompt_ids, map(_completion, outputs), self._version)

    def _update(self, trainer: Any) -> None:
        state = trainer.weights_state
        if state != self._seen:
            self._version = self.llm.update_weights(trainer.model.state_dict())
            self._seen = state


def _completion(output: Any) -> Completion:
    (choice,) = output.choices
    logprobs = choice.logprobs
    return Completion(
        token_ids=choice.token_ids,
        logprobs=None if logprobs is None else [token.logprob for token in logprobs],
        routed_experts=choice.routed_experts,
        finish_reason=choice.finish_reason.value,
    )
