"""A `GRPOTrainer` of the user's own under replay, and set-ups that cannot be followed."""

from __future__ import annotations

from typing import Any

import pytest

from routebook.errors import ConfigError
from tests.replay.trl.runs import R3GRPOTrainer, Scripted, logged, make, trl


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
