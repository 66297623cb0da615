"""The example trains on the routes that the engine took, and scores sums as a person would."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytest.importorskip("matplotlib")

from examples.grpo_arithmetic.optimizer import MasterWeightsAdamW
from examples.grpo_arithmetic.settings import Settings
from examples.grpo_arithmetic.task import pairs, prompts, reward, rewards
from examples.grpo_arithmetic.training import make_trainer, train
from examples.grpo_arithmetic.warm_up import warm_up

from routebook import LLM

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TINY_RUN = Settings(
    steps=2, seeds=(0,), warm_up_steps=2, prompts_per_step=2, completions_per_prompt=4
)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    warm_up(TINY_RUN, folder)
    return folder


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("857", 1.0),
        ("858", 0.0),
        ("85", 0.0),
        ("8570", 0.0),
        ("0857", 0.0),
        (" 857", 0.0),
        ("857\n1", 0.0),
        ("857+1=", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_sum_alone_is_rewarded(completion, expected):
    assert reward("371+486=", completion) == expected


def test_rewards_go_with_their_own_prompts():
    assert rewards(["100+100=", "999+999="], ["200", "1998"], extra=None) == [1.0, 1.0]
    assert rewards(["999+999=", "100+100="], ["200", "1998"]) == [0.0, 0.0]


def test_prompts_are_three_digit_sums_of_the_seed():
    assert prompts(50, 3) == [f"{a}+{b}=" for a, b in pairs(50, 3)]
    assert all(100 <= number <= 999 for pair in pairs(500, 3) for number in pair)
    assert prompts(50, 3) != prompts(50, 4)


def test_masters_keep_what_rounding_would_lose():
    """A hundred updates too small for bfloat16 must add up; a plain cast after each would lose them all."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = MasterWeightsAdamW([weight], lr=1e-4, weight_decay=0.0)
    plain = torch.nn.Parameter(torch.ones(4))
    oracle = torch.optim.AdamW([plain], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        for parameter, stepper in ((weight, optimizer), (plain, oracle)):
            parameter.grad = torch.ones(4)
            stepper.step()
        assert torch.equal(weight, weight.bfloat16().float())
    assert torch.equal(weight.detach(), plain.detach().bfloat16().float())
    assert weight[0] < 1


class Witness:
    """Notes, with plain hooks, the tokens of every forward and what each router gave out."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.forwards: list[tuple[bool, np.ndarray, np.ndarray, list[np.ndarray]]] = []
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(self._take)

    def _begin(self, module, args, kwargs):
        ids, mask = (kwargs[name].cpu().numpy() for name in ("input_ids", "attention_mask"))
        self.forwards.append((torch.is_grad_enabled(), ids, mask.astype(bool), []))

    def _take(self, module, args, output):
        self.forwards[-1][-1].append(output[-1].detach().cpu().numpy())

    def rows(self):
        """(whether of a loss, tokens, ids `[T, L, K]`) of each sequence of each forward."""
        for has_gradient, ids_BS, mask_BS, taken in self.forwards:
            ids_BSLK = np.stack(taken, axis=1).reshape(*ids_BS.shape, len(taken), -1)
            for ids_S, mask_S, ids_SLK in zip(ids_BS, mask_BS, ids_BSLK, strict=True):
                yield has_gradient, tuple(ids_S[mask_S].tolist()), ids_SLK[mask_S]


def watch(trainer):
    """What the engine hands out and what the trainer's routers take, while two steps run."""
    witness, handed_out = Witness(trainer.model), defaultdict(list)
    ask = trainer._ask_rollouts

    def noting(prompts, trainer):
        output = ask(prompts, trainer)
        for prompt, completion, record in zip(
            output["prompt_ids"], output["completion_ids"], output["routed_experts"], strict=True
        ):
            handed_out[(*prompt, *completion)].append(record.ids_TLK)
        return output

    trainer._ask_rollouts = noting
    trainer.train()
    return witness, handed_out


def test_the_loss_is_computed_along_the_engines_rows(start, tmp_path):
    trainer = make_trainer(
        TINY_RUN, start, 0, LLM(str(start), dtype="bfloat16"), str(tmp_path), replays=True
    )
    witness, handed_out = watch(trainer)
    num_sequences = 0
    for is_of_loss, tokens, ids_TLK in witness.rows():
        if is_of_loss:
            num_sequences += 1
            taken = np.sort(ids_TLK[:-1], axis=2)
            assert any(np.array_equal(taken, np.sort(rows, axis=2)) for rows in handed_out[tokens])
    assert num_sequences == 2 * 2 * 4


def test_a_run_reports_what_it_saw(start):
    run = train(TINY_RUN, start, 0, replays=True)
    assert [step.step for step in run.steps] == [1, 2]
    assert all(step.native_gap is not None and step.gap.kl > 0 for step in run.steps)
    assert run.drift.num_tokens > 100
    assert msgspec.json.decode(msgspec.json.encode(run), type=type(run)) == run
