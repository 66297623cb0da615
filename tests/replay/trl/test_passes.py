"""Every pass of the trainer takes the rows of its own sequences, told by which experts were run."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from routebook.routes import RoutedExperts
from tests.replay.trl.runs import (
    EOS,
    PROSE,
    SCHEMA,
    Dataset,
    R3GRPOTrainer,
    ReplayConfig,
    RouteBook,
    Scripted,
    foreign_rows,
    logged,
    make,
    sorted_rows,
    watched,
)

SET_UPS: dict[str, dict[str, Any]] = {
    "on policy": {},
    "accumulation": {"gradient_accumulation_steps": 2, "steps_per_generation": 2},
    "two generations in one step": {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
    "steps and iterations": {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 5},
    "padded to eights": {"pad_to_multiple_of": 8, "steps_per_generation": 2},
    "load balancing": {"router_aux_loss_coef": 0.01},
    "checkpointing": {"steps_per_generation": 2, "gradient_checkpointing": True},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


def check_pass(sequences: Any, rollouts: Scripted) -> int:
    count = 0
    for tokens, rows in sequences:
        assert np.array_equal(rows, sorted_rows(rollouts.record_of(tokens), len(rows)))
        count += 1
    return count


@pytest.mark.parametrize("name", SET_UPS)
def test_experts_that_run_are_those_of_the_record(name, tmp_path):
    rollouts = Scripted()
    set_up = {"gradient_checkpointing": False, **SET_UPS[name]}
    trainer = make(tmp_path, rollouts, **set_up)
    with watched(trainer.model) as passes:
        trainer.train()
    losses = [one for one in passes if one.has_gradient]
    steps = trainer.args.max_steps * trainer.args.gradient_accumulation_steps
    assert len(losses) == steps
    for one in passes:
        assert check_pass(one.sequences(), rollouts) == 4
        assert len(one.layers) == 6
    if set_up["gradient_checkpointing"]:
        for one in losses:
            assert check_pass(one.recomputed_sequences(), rollouts) == 4
    # TRL computes old log-probabilities only where a generation is used by several steps.
    has_old = trainer.args.gradient_accumulation_steps % (
        trainer.args.steps_per_generation * trainer.args.num_iterations
    )
    assert (len(passes) > len(losses)) == bool(has_old)
    assert logged(trainer, "replay/sequences") == [1.0] * trainer.args.max_steps
    assert logged(trainer, "replay/native_rows") == [0.0] * trainer.args.max_steps


@pytest.mark.parametrize("reference", [False, True])
def test_the_reference_is_replayed_by_choice(reference, tmp_path):
    rollouts = Scripted()
    trainer = make(tmp_path, rollouts, ReplayConfig(reference=reference), beta=0.1)
    with watched(trainer.ref_model) as passes, watched(trainer.model) as own:
        trainer.train()
    assert passes
    assert all(check_pass(one.sequences(), rollouts) for one in own if one.layers)
    for one in passes:
        for tokens, rows in one.sequences():
            expected = sorted_rows(rollouts.record_of(tokens), len(rows))
            assert np.array_equal(rows, expected) == reference
    assert all(kl >= 0 for kl in logged(trainer, "kl"))


class Keeping(R3GRPOTrainer):
    """Keeps how far the log-probabilities of each loss are from the old ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.distances: list[float] = []
        super().__init__(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.last = result[0].detach()
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"]
        self.distances.append(((self.last - inputs["old_per_token_logps"]) * mask).abs().max())
        return loss


def test_sequences_of_the_same_tokens_keep_each_its_own_rows(tmp_path):
    """With a learning rate of zero new and old log-probabilities are the same, if both take the same rows."""
    rollouts = Scripted(same_tokens=True)
    set_up = {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 8, "learning_rate": 0.0}
    trainer = make(tmp_path, rollouts, kind=Keeping, **set_up)
    with watched(trainer.model) as passes:
        trainer.train()
    (generation,) = rollouts.generations
    assert len({tuple(tokens) for tokens, _ in generation}) <= 4
    wanted = sorted(sorted_rows(record, record.num_rows).tobytes() for _, record in generation)
    assert len(set(wanted)) == 16
    for part, times in (([p for p in passes if p.has_gradient], 2), (passes, 3)):
        ran = [rows.tobytes() for one in part for _, rows in one.sequences()]
        assert sorted(ran) == sorted(wanted * times)
    assert max(trainer.distances) < 1e-5
    assert logged(trainer, "replay/twins") == [1.0]


def test_an_evaluation_leaves_the_records_of_training(tmp_path):
    rollouts = Scripted()
    trainer = make(
        tmp_path,
        rollouts,
        eval_dataset=Dataset.from_dict({"prompt": PROSE[:2]}),
        eval_strategy="steps",
        eval_steps=1,
        steps_per_generation=4,
        max_steps=4,
    )
    with watched(trainer.model) as passes:
        trainer.train()
    assert all(check_pass(one.sequences(), rollouts) for one in passes)
    assert len(logged(trainer, "eval_replay/sequences")) == 4
    assert trainer.state.global_step == 4


def test_masked_completions_have_no_routes_and_no_part(tmp_path):
    """TRL cuts a truncated sequence to its prompt; what is left counts nowhere."""
    rollouts = Scripted()
    trainer = make(tmp_path, rollouts, mask_truncated_completions=True, max_steps=3)
    with watched(trainer.model) as passes:
        trainer.train()
    whole = [tokens for rollouts in rollouts.generations for tokens, _ in rollouts]
    num_masked = 0
    for one in passes:
        for tokens, rows in one.sequences():
            if tokens in whole:
                assert tokens[-1] == EOS
                assert np.array_equal(rows, sorted_rows(rollouts.record_of(tokens), len(rows)))
            else:
                num_masked += 1
    assert 0 < num_masked < 12
    assert logged(trainer, "replay/sequences") == [1.0] * 3


def test_what_masking_leaves_of_one_sequence_is_not_taken_for_another_whole_one():
    """The prompt of the second is the first, prompt and completion."""
    generator = np.random.default_rng(0)
    tokens = [[5, 6, 7, EOS], [5, 6, 7, EOS, 9]]
    records = [
        RoutedExperts.from_rows(SCHEMA, foreign_rows(len(ids) - 1, generator), ids)
        for ids in tokens
    ]
    book = RouteBook(SCHEMA, refuses_absent=True, masks_truncated=True)
    book.replace([[5, 6], [5, 6, 7, EOS]], [[7, EOS], [9]], records)
    left = np.array([5, 6, 7, EOS], np.int32)
    book.check_order([left, left])
    first, second = book.find([left, left], None)
    assert first is not None
    assert first.record is records[0]
    assert second is None


def test_only_the_last_generation_is_held(tmp_path):
    rollouts = Scripted()
    trainer = make(tmp_path, rollouts, max_steps=3)
    trainer.train()
    first, last = rollouts.generations[0][0][1], rollouts.generations[-1][0][1]
    dead, alive = weakref.ref(first), weakref.ref(last)
    rollouts.generations.clear()
    del first, last
    gc.collect()
    assert dead() is None
    assert alive() is not None


def gradients_of(tmp_path: Any, **args: Any) -> dict[str, torch.Tensor]:
    """Gradients of the first step."""
    trainer = make(tmp_path, Scripted(), max_steps=1, gradient_accumulation_steps=2, **args)
    found: dict[str, torch.Tensor] = {}

    def keep(*_: Any, **__: Any) -> None:
        for name, parameter in trainer.model.named_parameters():
            found[name] = parameter.grad.clone()

    trainer.callback_handler.callbacks[-1].on_pre_optimizer_step = keep
    trainer.train()
    return found


def test_checkpointing_changes_no_gradient(tmp_path):
    plain = gradients_of(tmp_path, gradient_checkpointing=False)
    routers = [name for name in plain if name.endswith("mlp.gate.weight")]
    assert len(routers) == 6
    assert all(plain[name].abs().max() > 0 for name in routers)
    for reentrant in (False, True):
        others = gradients_of(
            tmp_path,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        assert plain.keys() == others.keys()
        assert max((plain[name] - others[name]).abs().max() for name in plain) < 1e-6
    native = gradients_of(
        tmp_path, replay=ReplayConfig(enabled=False), gradient_checkpointing=False
    )
    assert max((plain[name] - native[name]).abs().max() for name in plain) > 1e-3
