"""A `GRPOTrainer` of the user's own under replay, and set-ups that cannot be followed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from routebook.errors import ConfigError, ReplayError
from tests.replay.trl.runs import R3GRPOTrainer, ReplayConfig, Scripted, logged, make, trl


class Counting(trl.GRPOTrainer):
    """Counts losses, and looks as a test wants it to."""

    looks: tuple[str, Any] = ("looks_like", "itself")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.num_losses = 0
        super().__init__(*args, **kwargs)
        setattr(self, *self.looks)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.num_losses += 1
        return super()._compute_loss(model, inputs)


class Joined(R3GRPOTrainer, Counting):
    """Both."""


def test_replay_joins_a_trainer_of_ones_own(tmp_path):
    trainer = make(tmp_path, Scripted(), kind=Joined)
    trainer.train()
    assert trainer.num_losses == 2
    assert logged(trainer, "replay/sequences") == [1.0, 1.0]


def test_a_loss_that_computes_its_own_log_probabilities_is_refused(tmp_path):
    """It would run along the live routers, and nobody would hear of it."""

    class OwnLoss(trl.GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return model(input_ids=inputs["prompt_ids"]).logits.mean()

    class Both(R3GRPOTrainer, OwnLoss):
        pass

    with pytest.raises(ReplayError, match="computed without _get_per_token_logps"):
        make(tmp_path, Scripted(), kind=Both).train()
    make(tmp_path, Scripted(), ReplayConfig(enabled=False), kind=Both).train()


def test_a_trainer_that_changes_the_order_of_rollouts_is_refused(tmp_path):
    class Reversing(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            return {
                name: value.flip(0) if isinstance(value, torch.Tensor) and value.dim() else value
                for name, value in output.items()
            }

    class Both(R3GRPOTrainer, Reversing):
        pass

    with pytest.raises(ReplayError, match="was rolled out as number 3"):
        make(tmp_path, Scripted(), kind=Both).train()


def test_a_reward_that_asks_for_log_probabilities_is_told_that_it_cannot(tmp_path):
    class Asking(trl.GRPOTrainer):
        def _calculate_rewards(self, *args: Any) -> Any:
            ids = torch.ones((1, 3), dtype=torch.int64)
            self._get_per_token_logps_and_entropies(self.model, ids, ids, 1)
            return super()._calculate_rewards(*args)

    class Both(R3GRPOTrainer, Asking):
        pass

    with pytest.raises(ReplayError, match="outside of a generation"):
        make(tmp_path, Scripted(), kind=Both).train()


@pytest.mark.parametrize(
    ("name", "message"),
    [("_is_vlm", "images"), ("is_fsdp_enabled", "FSDP"), ("is_deepspeed_enabled", "DeepSpeed")],
)
def test_a_set_up_that_cannot_be_followed_is_refused(name, message, tmp_path):
    class Looking(Counting):
        looks = (name, True)

    class Both(R3GRPOTrainer, Looking):
        pass

    with pytest.raises(ConfigError, match=message):
        make(tmp_path, Scripted(), kind=Both)


def test_adapters_are_refused(tmp_path):
    class Adapted(Counting):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model.peft_config = {}

    class Both(R3GRPOTrainer, Adapted):
        pass

    with pytest.raises(ConfigError, match="PEFT"):
        make(tmp_path, Scripted(), kind=Both)
