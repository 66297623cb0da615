from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from routebook.client import read_openai
from routebook.errors import FormatError, RecordError, RequestError, ServerError
from routebook.routes.formats import FORMAT_NAMES
from tests.client.fake import FakeServer

PROMPT = [72, 101, 108, 108, 111]
SERVER = FakeServer()


def body(name: str, n: int, start: int = 0) -> dict[str, Any]:
    params = {"n": n, "max_tokens": 4, "routed_experts_prompt_start": start}
    return {
        "token_ids": PROMPT,
        "sampling_params": params,
        "output_mode": "text",
        "return_routed_experts": True,
        "routed_experts_format": name,
    }


def completions(name: str = "frame", n: int = 1, start: int = 0) -> dict[str, Any]:
    choices = [SERVER.choice(body(name, n, start), index) for index in range(n)]
    return {
        "id": "cmpl-1",
        "choices": [{**choice, "prompt_token_ids": PROMPT, "logprobs": None} for choice in choices],
    }


def chat(name: str = "frame", n: int = 1) -> dict[str, Any]:
    answer = completions(name, n)
    for choice in answer["choices"]:
        del choice["prompt_token_ids"]
        choice["message"] = {"role": "assistant", "content": choice.pop("text")}
    return {**answer, "prompt_token_ids": PROMPT}


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("make", [completions, chat])
def test_rows_are_read_out_of_both_kinds_of_answers(make, name):
    schema = None if name == "frame" else SERVER.schema
    generation = read_openai(make(name, 2), routed_experts_format=name, schema=schema)
    assert generation.prompt_token_ids == tuple(PROMPT)
    for index, choice in enumerate(generation.choices):
        assert choice.text == "".join(map(chr, SERVER.sampled(body(name, 2), index)))
        expected = SERVER.record(body(name, 2), index)
        assert choice.routed_experts is not None
        assert np.array_equal(choice.routed_experts.ids_TLK, expected.ids_TLK)


def test_an_object_of_another_package_is_read_by_its_dump():
    class Answer:
        def model_dump(self) -> dict[str, Any]:
            return completions(start=2)

    generation = read_openai(Answer(), routed_experts_format="frame", routed_experts_prompt_start=2)
    record = generation.choices[0].routed_experts
    assert record is not None
    assert (record.start, record.stop) == (2, 8)


def without(answer: dict[str, Any], name: str) -> dict[str, Any]:
    for choice in answer["choices"]:
        choice.pop(name)
    return answer


def of_two_prompts() -> dict[str, Any]:
    answer = completions(n=2)
    answer["choices"][1]["prompt_token_ids"] = [1, 2]
    return answer


@pytest.mark.parametrize(
    ("answer", "kind", "word"),
    [
        ({"choices": []}, FormatError, "no choices"),
        ("text", FormatError, "no choices"),
        (of_two_prompts(), FormatError, "of 2 prompts"),
        (without(completions(), "prompt_token_ids"), FormatError, "of 0 prompts.*return_token_ids"),
        (without(completions(), "routed_experts"), ServerError, "without routed experts"),
        (without(completions(), "token_ids"), RecordError, "end at position 8"),
        (without(completions(), "index"), FormatError, "index"),
    ],
)
def test_an_answer_that_lacks_something_is_refused(answer, kind, word):
    with pytest.raises(kind, match=word):
        read_openai(answer, routed_experts_format="frame")


def test_rows_that_do_not_tell_their_schema_need_one():
    with pytest.raises(RequestError, match="pass schema="):
        read_openai(completions("vllm"))
