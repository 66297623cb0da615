"""Which flags there are, and that each of them arrives where it should."""

from __future__ import annotations

import argparse
from dataclasses import fields
from types import SimpleNamespace

import pytest

from routebook.cli import generate as generate_module
from routebook.cli.parser import build_parser
from routebook.engine.config import CacheConfig, ExecutorConfig, ModelConfig, SchedulerConfig
from routebook.engine.sampling_params import SamplingParams
from routebook.engine.verification import Verifier

# A new flag is a promise to users: write it down here, on purpose.
FLAGS = {
    "demo": "--help --out",
    "drift": "--help --model --dtype --device --json --html",
    "generate": """--help --prompt --prompts-file --out
        --n --max-tokens --temperature --top-k --top-p --min-p --seed --stop --stop-token-ids
        --include-stop-text --no-include-stop-text --skip-special-tokens --no-skip-special-tokens
        --ignore-eos --no-ignore-eos --logprobs --routed-experts --no-routed-experts
        --routed-experts-prompt-start
        --dtype --device --reference --no-reference
        --block-size --num-blocks --kv-cache-gib --prefix-caching --no-prefix-caching --ledger
        --recompute --check-when-idle --no-check-when-idle
        --max-num-seqs --max-num-batched-tokens --max-model-len --max-steps-in-flight --base-seed
        --executor""",
    "inspect": "--help --json --html",
    "serve": """--help --host --port --api-key --served-model-name --chat-template
        --return-routed-experts --no-return-routed-experts --max-queued --max-open-requests
        --max-request-bytes --stall-timeout --encoder-threads
        --dtype --device --reference --no-reference
        --block-size --num-blocks --kv-cache-gib --prefix-caching --no-prefix-caching --ledger
        --recompute --check-when-idle --no-check-when-idle
        --max-num-seqs --max-num-batched-tokens --max-model-len --max-steps-in-flight --base-seed
        --executor""",
    "verify": "--help --model --ignore-order --dtype --device",
}

# For every field: what a user writes, and what the component gets. No value is the default.
SAMPLING = {
    "n": (["--n", "2"], 2),
    "max_tokens": (["--max-tokens", "7"], 7),
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_k": (["--top-k", "9"], 9),
    "top_p": (["--top-p", "0.9"], 0.9),
    "min_p": (["--min-p", "0.1"], 0.1),
    "seed": (["--seed", "3"], 3),
    "stop": (["--stop", "a", "--stop", "b c"], ("a", "b c")),
    "stop_token_ids": (["--stop-token-ids", "4", "--stop-token-ids", "5"], (4, 5)),
    "include_stop_text": (["--include-stop-text"], True),
    "skip_special_tokens": (["--no-skip-special-tokens"], False),
    "ignore_eos": (["--ignore-eos"], True),
    "logprobs": (["--logprobs", "0"], 0),
    "routed_experts": (["--no-routed-experts"], False),
    "routed_experts_prompt_start": (["--routed-experts-prompt-start", "1"], 1),
}
ENGINE = {
    "dtype": (["--dtype", "float64"], "float64"),
    "device": (["--device", "cpu"], "cpu"),
    "reference": (["--reference"], True),
    "block_size": (["--block-size", "4"], 4),
    "num_blocks": (["--num-blocks", "11"], 11),
    "kv_cache_gib": (["--kv-cache-gib", "0.25"], 0.25),
    "prefix_caching": (["--no-prefix-caching"], False),
    "ledger": (["--ledger", "slot"], "slot"),
    "recompute": (["--recompute", "latest"], "latest"),
    "check_when_idle": (["--check-when-idle"], True),
    "max_num_seqs": (["--max-num-seqs", "6"], 6),
    "max_num_batched_tokens": (["--max-num-batched-tokens", "64"], 64),
    "max_steps_in_flight": (["--max-steps-in-flight", "2"], 2),
    "max_model_len": (["--max-model-len", "128"], 128),
    "base_seed": (["--base-seed", "8"], 8),
    "executor": (["--executor", "process"], "process"),
}


def subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


@pytest.fixture
def engine(monkeypatch):
    """An engine that generates nothing and remembers what it was given."""
    given = SimpleNamespace(model=None, config=None, prompts=None, params=None)

    class FakeLLM:
        def __init__(self, model, **config):
            given.model, given.config = model, config

        def generate(self, prompts, params, *, progress):
            given.prompts, given.params = prompts, params
            return []

    module = SimpleNamespace(LLM=FakeLLM)
    monkeypatch.setattr(generate_module, "engine_module", lambda name: module)
    return given


def test_the_flags_are_those_that_were_agreed():
    found = {
        name: {flag for a in parser._actions for flag in a.option_strings if flag != "-h"}
        for name, parser in subparsers().items()
    }
    assert found == {name: set(flags.split()) for name, flags in FLAGS.items()}


def test_every_field_is_listed_with_a_value_other_than_its_default():
    parts = (ModelConfig, CacheConfig, SchedulerConfig, ExecutorConfig)
    sampling = {f.name: f.default for f in fields(SamplingParams)}
    engine = {f.name: f.default for part in parts for f in fields(part)}
    assert (set(SAMPLING), set(ENGINE)) == (set(sampling), set(engine))
    for name, (_, value) in (SAMPLING | ENGINE).items():
        assert value != (sampling | engine)[name]


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_flag_reaches_the_engine(run, engine, name):
    flags, value = SAMPLING[name]
    assert run("generate", "m", "--prompt", "p", *flags).status == 0
    assert engine.params == SamplingParams(**{name: value})
    assert type(getattr(engine.params, name)) is type(value)
    assert (engine.model, engine.prompts, engine.config) == ("m", ["p"], {})


@pytest.mark.parametrize("name", ENGINE)
def test_an_engine_flag_reaches_the_engine(run, engine, name):
    flags, value = ENGINE[name]
    assert run("generate", "m", "--prompt", "p", *flags).status == 0
    assert engine.config == {name: value}
    assert type(engine.config[name]) is type(value)
    assert engine.params == SamplingParams()


def test_without_flags_nothing_is_set(run, engine):
    assert run("generate", "m", "--prompt", "p").status == 0
    assert (engine.config, engine.params) == ({}, SamplingParams())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ("tiny", "float32", "auto")),
        (["--dtype", "bfloat16", "--device", "cpu"], ("tiny", "bfloat16", "cpu")),
    ],
)
def test_the_flags_of_verify_reach_the_verifier(run, record, monkeypatch, flags, expected):
    given = []

    class Remembering(Verifier):
        def __init__(self, model, config):
            given.append((model, config.dtype, config.device))
            super().__init__(model, config)

    monkeypatch.setattr("routebook.engine.verification.Verifier", Remembering)
    assert run("verify", record, "--model", "tiny", *flags).status in (0, 1)
    assert given == [expected]


@pytest.mark.parametrize("command", FLAGS)
def test_help_tells_every_flag_with_its_field_s_own_words(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        build_parser().parse_args([command, "--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(flag in text for flag in FLAGS[command].split())
    kinds = (SamplingParams, ModelConfig, CacheConfig, SchedulerConfig, ExecutorConfig)
    if command == "generate":
        # The formatter breaks lines, also behind a hyphen.
        squeezed = text.replace(" ", "")
        for field in (f for kind in kinds for f in fields(kind)):
            assert field.metadata["help"].replace(" ", "") in squeezed


def test_defaults_are_told_where_there_are_some(capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "tokens to generate at most (default: 128)" in text
    assert "go on past the end-of-sequence token (default: off)" in text
    assert "share the KV blocks of equal prefixes (default: on)" in text
    assert "they are cut off; repeatable" in text
    assert "None" not in text
    assert "()" not in text
