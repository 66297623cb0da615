"""`/generate` with SGLang's fields."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from routebook.engine.sampling_params import SamplingParams
from routebook.routes import RoutedExperts
from routebook.routes.formats import get_format
from tests.server.conftest import PROMPT
from tests.server.events import read_events

SAMPLING = {"max_new_tokens": 7, "temperature": 1.0, "sampling_seed": 9, "ignore_eos": True}
PARAMS = {"max_tokens": 7, "temperature": 1.0, "seed": 9, "ignore_eos": True}


def offline(llm, prompt, **params):
    (output,) = llm.generate([prompt], SamplingParams(**PARAMS, **params))
    return output


def test_rows_are_raw_int32_of_all_hidden_layers(http, llm):
    output = offline(llm, PROMPT)
    body = {"text": PROMPT, "sampling_params": SAMPLING, "return_routed_experts": True}
    answer = http.post("/generate", json=body).raise_for_status().json()
    (choice,) = output.choices
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"]) == (choice.text, list(choice.token_ids))
    assert meta["finish_reason"] == {"type": "length", "length": 7}
    assert meta["prompt_tokens"] == len(output.prompt_token_ids)
    ids = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(-1, 6, 4)
    assert (ids == choice.routed_experts.ids_TLK).all()


def test_rows_can_begin_later(http, llm):
    output = offline(llm, PROMPT)
    body = {
        "input_ids": list(output.prompt_token_ids),
        "sampling_params": SAMPLING,
        "return_routed_experts": True,
        "routed_experts_start_len": 10,
    }
    meta = http.post("/generate", json=body).raise_for_status().json()["meta_info"]
    ids = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(-1, 6, 4)
    assert (ids == output.choices[0].routed_experts.ids_TLK[10:]).all()


def test_log_probabilities(http, llm):
    (choice,) = offline(llm, PROMPT, logprobs=2).choices
    body = {
        "text": PROMPT,
        "sampling_params": SAMPLING,
        "return_logprob": True,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    answer = http.post("/generate", json=body).raise_for_status().json()
    found = answer["meta_info"]["output_token_logprobs"]
    assert [(x[0], x[1]) for x in found] == [(e.logprob, e.token_id) for e in choice.logprobs]
    assert "".join(x[2] for x in found) == answer["text"]
    tops = answer["meta_info"]["output_top_logprobs"]
    assert [[(x[1], x[0]) for x in top] for top in tops] == [list(e.top) for e in choice.logprobs]


def test_several_prompts_and_completions_are_a_list(http, llm):
    body = {"text": [PROMPT, "7+8="], "sampling_params": {**SAMPLING, "n": 2}}
    answers = http.post("/generate", json=body).raise_for_status().json()
    expected = [c for p in (PROMPT, "7+8=") for c in offline(llm, p, n=2).choices]
    assert [tuple(answer["output_ids"]) for answer in answers] == [c.token_ids for c in expected]


def test_a_stream_repeats_texts_and_adds_rows(http, llm):
    output = offline(llm, PROMPT)
    body = {
        "text": PROMPT,
        "sampling_params": SAMPLING,
        "stream": True,
        "return_routed_experts": True,
    }
    events = read_events(http.post("/generate", json=body))
    (choice,) = output.choices
    assert (events[-1]["text"], events[-1]["output_ids"]) == (choice.text, list(choice.token_ids))
    pieces = []
    for event in events:
        tokens = [*output.prompt_token_ids, *event["output_ids"]]
        meta = event["meta_info"]
        if "routed_experts" in meta:
            start = meta["routed_experts_start"]
            decode = get_format("sglang").decode
            pieces.append(decode(meta["routed_experts"], llm.schema, tokens, start))
    assert (RoutedExperts.concat(pieces).ids_TLK == choice.routed_experts.ids_TLK).all()


@pytest.mark.parametrize("body", [{}, {"text": "a", "input_ids": [5]}], ids=str)
def test_one_kind_of_prompt_is_needed(http, body):
    answer = http.post("/generate", json=body)
    assert answer.status_code == 400
    assert "either text or input_ids" in answer.json()["error"]["message"]


def test_a_stop_text_is_told(http, llm):
    (choice,) = offline(llm, PROMPT, stop=("\n",)).choices
    assert choice.stop_reason == "\n"
    body = {"text": PROMPT, "sampling_params": {**SAMPLING, "stop": "\n"}}
    answer = http.post("/generate", json=body).json()
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "\n"}
    assert answer["text"] == choice.text
