"""`/inference/v1/generate`: what it answers is what the engine computed, in every form."""

from __future__ import annotations

import io

import numpy as np
import pytest

from routebook.engine.sampling_params import SamplingParams
from routebook.routes import read_routes
from routebook.routes.formats import FORMAT_NAMES, FRAME_MEDIA_TYPE, get_format
from tests.server.conftest import PROMPT
from tests.server.events import join_choice, read_events

PATH = "/inference/v1/generate"
SAMPLING = {"max_tokens": 9, "temperature": 1.0, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def prompt(llm) -> list[int]:
    return llm.engine.tokenize(PROMPT)


def offline(llm, prompt, **params):
    (output,) = llm.generate([prompt], SamplingParams(**params))
    return output


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_every_format_reads_back_as_the_engine_s_record(http, llm, prompt, name):
    expected = offline(llm, prompt, **SAMPLING).choices[0]
    body = {
        "request_id": f"my-{name}",
        "token_ids": prompt,
        "sampling_params": SAMPLING,
        "return_routed_experts": True,
        "routed_experts_format": name,
    }
    answer = http.post(PATH, json=body).raise_for_status().json()
    (choice,) = answer["choices"]
    assert answer["request_id"] == f"my-{name}"
    assert tuple(choice["token_ids"]) == expected.token_ids
    assert choice["finish_reason"] == "length"
    assert choice["routed_experts_start"] == 0
    tokens = [*prompt, *choice["token_ids"]]
    record = get_format(name).decode(choice["routed_experts"], llm.schema, tokens)
    known = record.slice(0, len(tokens) - 1)
    assert (known.ids_TLK == expected.routed_experts.ids_TLK).all()
    assert known.complete
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 9,
        "total_tokens": len(prompt) + 9,
    }


def test_frames_are_a_file_of_routes(http, llm, prompt, tmp_path):
    expected = offline(llm, prompt, n=2, logprobs=1, **SAMPLING)
    sampling = {**SAMPLING, "n": 2, "logprobs": 1}
    answer = http.post(
        PATH,
        json={"token_ids": prompt, "sampling_params": sampling, "output_mode": "text"},
        headers={"accept": FRAME_MEDIA_TYPE},
    ).raise_for_status()
    assert answer.headers["content-type"] == FRAME_MEDIA_TYPE
    (tmp_path / "answer.routes").write_bytes(answer.content)
    samples = list(read_routes(tmp_path / "answer.routes"))
    for sample, choice in zip(samples, expected.choices, strict=True):
        assert sample.record.complete
        assert (sample.record.ids_TLK == choice.routed_experts.ids_TLK).all()
    assert [tuple(s.sampled_token_ids) for s in samples] == [c.token_ids for c in expected.choices]
    assert [s.meta["index"] for s in samples] == ["0", "1"]
    assert [s.meta["text"] for s in samples] == [c.text for c in expected.choices]


@pytest.mark.parametrize("name", [name for name in FORMAT_NAMES if get_format(name).streams])
def test_joined_increments_are_the_whole_record(http, llm, prompt, name):
    expected = offline(llm, prompt, **SAMPLING).choices[0]
    body = {
        "token_ids": prompt,
        "sampling_params": SAMPLING,
        "return_routed_experts": True,
        "routed_experts_format": name,
        "stream": True,
    }
    events = read_events(http.post(PATH, json=body))
    tokens, record = join_choice(events, 0, prompt, llm.schema, name)
    assert tuple(tokens) == expected.token_ids
    assert record.start == 0
    assert (record.ids_TLK == expected.routed_experts.ids_TLK).all()


def test_several_completions_in_a_stream_share_the_prompt_s_rows(http, llm, prompt):
    expected = offline(llm, prompt, n=3, **SAMPLING)
    body = {
        "token_ids": prompt,
        "sampling_params": {**SAMPLING, "n": 3},
        "return_routed_experts": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    events = read_events(http.post(PATH, json=body))
    assert events[-1]["usage"]["completion_tokens"] == 27
    _, first = join_choice(events, 0, prompt, llm.schema)
    for choice in expected.choices:
        tokens, record = join_choice(events, choice.index, prompt, llm.schema)
        assert tuple(tokens) == choice.token_ids
        assert record.start == (len(prompt) if choice.index else 0)
        whole = choice.routed_experts.ids_TLK
        assert (record.ids_TLK == whole[record.start :]).all()
        assert (first.ids_TLK[: record.start] == whole[: record.start]).all()


def test_whole_answers_give_every_completion_all_rows(http, llm, prompt):
    expected = offline(llm, prompt, n=2, **SAMPLING)
    body = {
        "token_ids": prompt,
        "sampling_params": {**SAMPLING, "n": 2},
        "return_routed_experts": True,
    }
    choices = http.post(PATH, json=body).raise_for_status().json()["choices"]
    for found, choice in zip(choices, expected.choices, strict=True):
        tokens = [*prompt, *found["token_ids"]]
        record = get_format("vllm").decode(found["routed_experts"], llm.schema, tokens)
        assert (record.ids_TLK == choice.routed_experts.ids_TLK).all()


@pytest.mark.parametrize("where", ["sampling_params", "body"])
def test_rows_begin_where_they_were_asked_to(http, llm, prompt, where):
    start = {"routed_experts_prompt_start": 5}
    sampling = SAMPLING | (start if where == "sampling_params" else {})
    body = {"token_ids": prompt, "sampling_params": sampling, "return_routed_experts": True}
    (choice,) = http.post(PATH, json=body | (start if where == "body" else {})).json()["choices"]
    assert choice["routed_experts_start"] == 5
    record = offline(llm, prompt, **SAMPLING).choices[0].routed_experts
    tokens = [*prompt, *choice["token_ids"]]
    found = get_format("vllm").decode(choice["routed_experts"], llm.schema, tokens, 5)
    assert (found.ids_TLK == record.ids_TLK[5:]).all()


def test_numpy_alone_reads_the_default_format(http, llm, prompt):
    import base64

    body = {"token_ids": prompt, "sampling_params": SAMPLING, "return_routed_experts": True}
    (choice,) = http.post(PATH, json=body).json()["choices"]
    ids = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert ids.shape == (len(prompt) + 8, 6, 4)
    assert ids.dtype == np.uint8


def test_without_being_asked_there_are_no_rows(http, prompt):
    for stream in (False, True):
        answer = http.post(
            PATH, json={"token_ids": prompt, "stream": stream, "sampling_params": SAMPLING}
        )
        assert answer.status_code == 200
        assert "routed_experts" not in answer.text


def test_text_mode_and_token_ids(http, llm, prompt):
    expected = offline(llm, prompt, logprobs=2, **SAMPLING).choices[0]
    body = {
        "token_ids": prompt,
        "sampling_params": {**SAMPLING, "logprobs": 2},
        "output_mode": "text",
        "return_token_ids": True,
    }
    answer = http.post(PATH, json=body).raise_for_status().json()
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == prompt
    assert choice["text"] == expected.text
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == expected.text
    assert [entry["logprob"] for entry in content] == [e.logprob for e in expected.logprobs]
    events = read_events(http.post(PATH, json={**body, "stream": True}))
    assert "".join(c["text"] for e in events for c in e["choices"]) == expected.text
    assert [e for e in events if "prompt_token_ids" in e] == events[:1]


def test_log_probabilities_by_token_id(http, llm, prompt):
    expected = offline(llm, prompt, logprobs=3, **SAMPLING).choices[0].logprobs
    body = {"token_ids": prompt, "sampling_params": {**SAMPLING, "logprobs": 3}}
    (choice,) = http.post(PATH, json=body).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [(e["token_id"], e["logprob"]) for e in content] == [
        (e.token_id, e.logprob) for e in expected
    ]
    for found, entry in zip(content, expected, strict=True):
        ranked = {t["token_id"]: t["rank"] for t in found["top_logprobs"] if t["rank"]}
        assert all(entry.top[rank - 1][0] == token_id for token_id, rank in ranked.items())


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [5, 2048]}, "2048 lies outside the vocabulary"),
        ({"token_ids": [-1]}, "-1 lies outside"),
        ({"token_ids": [5] * 256}, "max_model_len=256"),
        ({"token_ids": ["5"]}, "token_ids.0"),
        ({"token_ids": [5.5]}, "token_ids.0"),
        ({"sampling_params": {"temperature": -1}}, "temperature=-1"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens=0"),
        ({"sampling_params": {"n": 5000}}, "n=5000"),
        ({"sampling_params": {"seed": 2**63}}, "seed="),
        ({"sampling_params": {"routed_experts_prompt_start": 4}}, "lies beyond the prompt"),
        ({"sampling_params": {"presence_penalty": 0.5}}, "presence_penalty"),
        ({"sampling_params": {"unheard_of": 1}}, "unheard_of"),
        ({"routed_experts_format": "pickle"}, "routed_experts_format='pickle'"),
        ({"routed_experts_format": "nemo_rl", "stream": True}, "nemo_rl"),
        ({"output_mode": "speech"}, "output_mode"),
    ],
    ids=str,
)
def test_mistakes_are_named(http, change, part):
    answer = http.post(PATH, json={"token_ids": [5, 6, 7], **change})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert part in error["message"]
    assert error["code"] == 400


def test_another_model_is_not_found(http):
    answer = http.post(PATH, json={"token_ids": [5], "model": "gpt"})
    assert answer.status_code == 404
    assert "'gpt'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "status"),
    [({"stream": True}, 406), ({"return_routed_experts": False}, 400)],
    ids=str,
)
def test_frames_cannot_carry_everything(http, change, status):
    body = {"token_ids": [5, 6], **change}
    assert http.post(PATH, json=body, headers={"accept": FRAME_MEDIA_TYPE}).status_code == status
