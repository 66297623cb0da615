"""Requests as trainers send them, field by field, against a server that hands out rows by default."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest

from routebook.engine.sampling_params import SamplingParams
from tests.server.conftest import PROMPT, running

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def http():
    with running(return_routed_experts=True) as server:
        with server.http() as client:
            yield client
        server.settle()


@pytest.fixture(scope="module")
def expected(llm):
    (output,) = llm.generate([PROMPT], GREEDY)
    return output


def test_a_rollout_of_slime(http, expected):
    """Tokens in, text with its stop text and special tokens out, rows as raw int32 that it shapes by itself."""
    body = {
        "input_ids": list(expected.prompt_token_ids),
        "sampling_params": {
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 6,
            "stop": None,
            "stop_token_ids": None,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            "ignore_eos": True,
        },
        "return_logprob": True,
        "return_routed_experts": True,
    }
    meta = http.post("/generate", json=body).raise_for_status().json()["meta_info"]
    (choice,) = expected.choices
    assert [item[1] for item in meta["output_token_logprobs"]] == list(choice.token_ids)
    ids = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    num_rows = len(expected.prompt_token_ids) + 6 - 1
    assert (ids.reshape(num_rows, 6, 4) == choice.routed_experts.ids_TLK).all()
    assert meta["finish_reason"]["type"] == "length"


def test_a_rollout_of_prime_rl(http, expected):
    """Rows from a start on, without a word about whether they are wanted."""
    start = len(expected.prompt_token_ids) - 3
    body = {
        "model": "tiny",
        "token_ids": list(expected.prompt_token_ids),
        "sampling_params": {
            "temperature": 0.0,
            "top_p": 1.0,
            "max_tokens": 6,
            "min_tokens": 0,
            "logprobs": 1,
            "seed": None,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "repetition_penalty": 1.0,
            "stop_token_ids": [],
            "routed_experts_prompt_start": start,
        },
        "cache_salt": "step-7",
        "priority": 0,
    }
    answer = http.post("/inference/v1/generate", json=body).raise_for_status().json()
    (found,), (choice,) = answer["choices"], expected.choices
    ids = np.load(io.BytesIO(base64.b64decode(found["routed_experts"])))
    assert (ids == choice.routed_experts.ids_TLK[start:]).all()


def test_a_chat_of_vllm_s_clients(http, llm):
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "17+25="}],
        "max_completion_tokens": 5,
        "temperature": 0,
        "top_k": -1,
        "logprobs": True,
        "top_logprobs": 1,
        "n": 2,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    for choice in answer["choices"]:
        ids = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        tokens = [*answer["prompt_token_ids"], *choice["token_ids"]]
        (whole,) = llm.generate([tokens], SamplingParams(max_tokens=1))
        assert (ids == whole.choices[0].routed_experts.ids_TLK[: len(tokens) - 1]).all()


def test_a_request_may_say_no(http):
    body = {"token_ids": [5, 6], "return_routed_experts": False}
    answer = http.post("/inference/v1/generate", json=body).raise_for_status()
    assert "routed_experts" not in answer.text
