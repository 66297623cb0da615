"""What rollout functions may return, the embedded engine's weights, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from routebook import LLM
from routebook.engine.model_loader import model_fingerprint
from routebook.engine.request import FinishReason
from routebook.errors import (
    ConfigError,
    DenseModelError,
    RecordError,
    ReplayError,
    SchemaMismatchError,
    SpanError,
    TokenMismatchError,
)
from routebook.routes import RoutedExperts, RouteSchema
from tests.replay.trl.runs import (
    PROSE,
    SCHEMA,
    TINY,
    Dataset,
    EngineRollouts,
    R3GRPOTrainer,
    ReplayConfig,
    Scripted,
    logged,
    make,
    sorted_rows,
    watched,
)


class Changed(Scripted):
    """Scripted rollouts of which a test changes something."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self._change = change

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        self._change(output)
        return output


def set_record(number: int, make_record: Any) -> Any:
    def change(output: dict[str, Any]) -> None:
        records = output["routed_experts"]
        records[number] = make_record(records[number])

    return change


def swap(output: dict[str, Any]) -> None:
    records = output["routed_experts"]
    records[0], records[1] = records[1], records[0]


def of_another_model(record: RoutedExperts) -> RoutedExperts:
    schema = RouteSchema(layer_ids=tuple(range(6)), num_experts=17, top_k=4, num_hidden_layers=6)
    return replace(record, schema=schema)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda output: output.pop("routed_experts"), ReplayError, "no 'routed_experts'"),
        (lambda output: output["routed_experts"].pop(), RecordError, "3 records for 4 prompts"),
        (swap, RecordError, "record of completion 0|row at position"),
        (set_record(2, lambda record: None), ReplayError, "completion 2 of the generation lacks"),
        (set_record(1, lambda r: r.truncate(r.stop - 1)), ReplayError, "lacks 1 of"),
        (set_record(1, lambda r: r.slice(1, r.stop)), ReplayError, "lacks 1 of"),
        (set_record(0, lambda record: record.ids_TLK), RecordError, "is a ndarray"),
        (set_record(3, of_another_model), SchemaMismatchError, "completion 3"),
        (lambda output: output["completion_ids"][0].__setitem__(0, 5), TokenMismatchError, "row"),
        (
            lambda output: output["completion_ids"].__setitem__(0, [9]),
            SpanError,
            "truncate it where the completion was cut",
        ),
    ],
)
def test_rollouts_that_do_not_fit_are_refused(change, error, message, tmp_path):
    trainer = make(tmp_path, Changed(change))
    with pytest.raises(error, match=message):
        trainer.train()


def test_rows_that_are_missing_by_choice_are_counted(tmp_path):
    """Of four sequences one has no record, and one lacks its first two rows and the last one that counts."""
    lacking: list[int] = []

    def change(output: dict[str, Any]) -> None:
        records = output["routed_experts"]
        records[1] = None
        records[2] = records[2].slice(2, records[2].stop - 1)
        lengths = [
            len(a) + len(b)
            for a, b in zip(output["prompt_ids"], output["completion_ids"], strict=True)
        ]
        lacking.append((lengths[1] - 1 + 3) / sum(length - 1 for length in lengths))

    rollouts = Changed(change)
    trainer = make(tmp_path, rollouts, ReplayConfig(missing="native"), max_steps=1)
    with watched(trainer.model) as passes:
        trainer.train()
    assert logged(trainer, "replay/sequences") == [0.75]
    assert logged(trainer, "replay/native_rows") == [pytest.approx(lacking[0])]
    (one,) = passes
    tokens = [whole for whole, _ in rollouts.generations[0]]
    for sequence, rows in one.sequences():
        same = (rows == sorted_rows(rollouts.record_of(sequence), len(rows))).all((1, 2))
        number = tokens.index(sequence)
        expected = {1: 0, 2: len(rows) - 3}.get(number, len(rows))
        assert same.sum() == expected


def test_a_row_of_the_last_token_is_not_needed_and_not_counted(tmp_path):
    """A trainer's own recording has one; the row after the last that counts must not hide one that lacks."""

    def change(output: dict[str, Any]) -> None:
        records = output["routed_experts"]
        ids = [*output["prompt_ids"][0], *output["completion_ids"][0]]
        last = RoutedExperts.from_rows(SCHEMA, records[0].ids_TLK[:1], ids, start=len(ids) - 1)
        records[0] = records[0].append(last).slice(1, len(ids))

    with pytest.raises(ReplayError, match="completion 0 of the generation lacks 1 of"):
        make(tmp_path, Changed(change)).train()


def test_a_generation_without_any_record_runs_natively_by_choice(tmp_path):
    def change(output: dict[str, Any]) -> None:
        output["routed_experts"] = [None] * len(output["prompt_ids"])

    trainer = make(tmp_path, Changed(change), ReplayConfig(missing="native"), max_steps=1)
    trainer.train()
    assert logged(trainer, "replay/sequences") == [0.0]
    assert logged(trainer, "replay/native_rows") == [1.0]


def test_tokens_that_change_after_the_rollout_are_an_error(tmp_path):
    trainer = make(tmp_path, Scripted())
    plain = trainer._compute_loss

    def change(model: Any, inputs: dict[str, Any]) -> Any:
        inputs["completion_ids"][0, 0] += 1
        return plain(model, inputs)

    trainer._compute_loss = change
    with pytest.raises(ReplayError, match="is not the one of 4 that was rolled out"):
        trainer.train()


def test_a_batch_that_lost_its_numbers_is_an_error(tmp_path):
    trainer = make(tmp_path, Scripted())
    plain = trainer._compute_loss

    def lose(model: Any, inputs: dict[str, Any]) -> Any:
        del inputs["rollout_number"]
        return plain(model, inputs)

    trainer._compute_loss = lose
    with pytest.raises(ReplayError, match="rollout_number"):
        trainer.train()


class Watching(EngineRollouts):
    """Notes, after each generation, what the engine's weights and rows were."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self.is_equal: list[bool] = []
        self.versions: list[set[int]] = []
        self.completions: list[list[list[int]]] = []

    def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        self.is_equal.append(self.llm.fingerprint == model_fingerprint(trainer.model))
        records = output["routed_experts"]
        self.versions.append({span.weight_version for r in records for span in r.provenance})
        self.completions.append(output["completion_ids"])
        return output


def test_the_engine_has_the_weights_of_the_step_that_it_samples_for(tmp_path):
    rollouts = Watching(LLM("tiny", dtype="bfloat16"))
    trainer = make(
        tmp_path,
        rollouts,
        max_steps=3,
        steps_per_generation=1,
        eval_dataset=Dataset.from_dict({"prompt": PROSE[:2]}),
        eval_strategy="steps",
        eval_steps=2,
        learning_rate=1e-2,
    )
    trainer.train()
    # Generations of steps 0 and 1, of the two batches of an evaluation, of step 2, and of the evaluation at the end.
    assert rollouts.versions == [{1}, {2}, {3}, {3}, {3}, {4}, {4}]
    assert logged(trainer, "replay/weight_version") == [1.0, 2.0, 3.0]
    assert logged(trainer, "eval_replay/weight_version") == [3.0, 4.0]
    assert len({tuple(ids) for ids in rollouts.completions[0]}) == 4
    trainer.train()
    assert rollouts.versions[7] == {5}
    assert all(rollouts.is_equal)


def evaluated(rollouts: Watching, trainer: Any) -> bool:
    """Whether the engine had the trainer's weights in an evaluation."""
    trainer.evaluate()
    return rollouts.is_equal[-1]


def test_each_trainer_of_one_engine_samples_from_its_own_weights(tmp_path):
    rollouts = Watching(LLM("tiny", dtype="bfloat16"))
    more = {"eval_dataset": Dataset.from_dict({"prompt": PROSE[:1]})}
    first = make(tmp_path, rollouts, **more)
    assert evaluated(rollouts, first)
    second = make(tmp_path, rollouts, **more)
    with torch.no_grad():
        second.model.lm_head.weight.mul_(1.5)
    assert evaluated(rollouts, second)
    assert evaluated(rollouts, first)
    # Written in place, between two generations and without a step.
    first.model.load_state_dict(second.model.state_dict())
    assert evaluated(rollouts, first)


def test_the_best_weights_loaded_at_the_end_reach_the_engine(tmp_path):
    rollouts = Watching(LLM("tiny", dtype="bfloat16"))
    trainer = make(
        tmp_path,
        rollouts,
        max_steps=2,
        learning_rate=1e-2,
        eval_dataset=Dataset.from_dict({"prompt": PROSE[:1]}),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        greater_is_better=False,
    )
    trainer.train()
    assert evaluated(rollouts, trainer)


def test_rows_of_other_weights_than_a_rollout_function_says_are_refused(tmp_path):
    def change(output: dict[str, Any]) -> None:
        output["weight_version"] = 7

    with pytest.raises(ReplayError, match="completion 0 has rows of weight versions"):
        make(tmp_path, Changed(change)).train()


def test_an_empty_completion_is_named(tmp_path):
    def change(output: dict[str, Any]) -> None:
        output["completion_ids"][2] = []

    with pytest.raises(RecordError, match="completion 2 of the generation has no token"):
        make(tmp_path, Changed(change)).train()


def test_weights_that_somebody_else_changes_are_noticed(tmp_path):
    llm = LLM("tiny", dtype="bfloat16")

    class Meddling(EngineRollouts):
        def _update(self, trainer: Any) -> None:
            super()._update(trainer)
            llm.update_weights(trainer.model.state_dict())

    trainer = make(tmp_path, Meddling(llm))
    with pytest.raises(ReplayError, match="rows of weight versions"):
        trainer.train()


def test_another_temperature_has_no_gap(tmp_path):
    """The engine's log-probabilities are those of temperature 1, the trainer's those of its own."""
    trainer = make(tmp_path, EngineRollouts(LLM("tiny")), max_steps=1, temperature=0.7)
    trainer.train()
    assert logged(trainer, "replay/sequences") == [1.0]
    assert not logged(trainer, "replay/gap/kl")


def dense() -> Any:
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=32,
        head_dim=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    config._name_or_path = TINY
    return Qwen3ForCausalLM(config)


def test_nothing_to_roll_out_with_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="rolls nothing out"):
        make(tmp_path, None)


def test_a_reference_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="set beta above 0"):
        make(tmp_path, Scripted(), ReplayConfig(reference=True))


def test_a_dense_model_is_refused_unless_nothing_is_replayed(tmp_path):
    with pytest.raises(DenseModelError):
        make(tmp_path, Scripted(), model=dense(), model_init_kwargs=None)
    off = ReplayConfig(enabled=False)
    make(tmp_path, Scripted(), off, model=dense(), model_init_kwargs=None).train()


@pytest.mark.parametrize("name", ["tools", "environment_factory"])
def test_turns_that_trl_generates_itself_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name} makes TRL generate"):
        R3GRPOTrainer(TINY, rollout_func=Scripted(), **{name: [print]})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs="),
    ],
)
def test_sampling_options_that_the_engine_lacks_are_refused(args, message, tmp_path):
    trainer = make(tmp_path, EngineRollouts(LLM("tiny")), **args)
    with pytest.raises(ConfigError, match=message):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"missing": "zero"}, "missing='zero'"),
        ({"extreme_ratio": 1.0}, "extreme_ratio=1.0"),
        ({"native_every": -1}, "native_every=-1"),
        ({"enabled": False, "reference": True}, "needs enabled=True"),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(ConfigError, match=message):
        ReplayConfig(**options)


def test_conversations_go_through_the_chat_template(tmp_path):
    rollouts = EngineRollouts(LLM("tiny"))
    trainer = make(tmp_path, rollouts)
    messages = [[{"role": "user", "content": "17+25="}]]
    output = rollouts(messages, trainer)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    expected = tokenizer.apply_chat_template(
        messages[0], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    assert output["prompt_ids"] == [expected["input_ids"]]


def test_a_completion_that_did_not_finish_is_an_error(tmp_path):
    llm = LLM("tiny")
    generate = llm.generate

    def abort_one(prompts: Any, params: Any) -> Any:
        *others, output = generate(prompts, params)
        choice = replace(output.choices[0], finish_reason=FinishReason.ABORT)
        return [*others, replace(output, choices=(choice,))]

    llm.generate = abort_one  # type: ignore[method-assign]
    trainer = make(tmp_path, EngineRollouts(llm))
    with pytest.raises(ReplayError, match="completion 3 ended with 'abort' after 8 tokens"):
        trainer.train()
