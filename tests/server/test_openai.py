"""The `openai` package, unchanged, against the server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from routebook.engine.sampling_params import SamplingParams
from routebook.routes.formats import get_format
from tests.server.conftest import CHAT_TEMPLATE, PROMPT
from tests.server.events import read_events

GREEDY = {"max_tokens": 8, "temperature": 0}
MESSAGES = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": [{"type": "text", "text": "17+"}, {"type": "text", "text": "25="}]},
]
RENDERED = "system: Add.\nuser: 17+25=\nassistant: "


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def offline(llm, prompt, **params):
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0.0, **params))
    return output.choices


def test_a_completion(client, llm):
    (expected,) = offline(llm, PROMPT)
    answer = client.completions.create(model="tiny", prompt=PROMPT, **GREEDY)
    assert answer.object == "text_completion"
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason.value)
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.prompt_tokens == len(llm.engine.tokenize(PROMPT))


def test_several_prompts_and_completions_keep_their_order(client, llm):
    prompts = [PROMPT, "7+8="]
    answer = client.completions.create(model="tiny", prompt=prompts, n=2, seed=4, max_tokens=5)
    params = SamplingParams(n=2, seed=4, max_tokens=5, temperature=1.0)
    expected = [c.text for output in llm.generate(prompts, [params] * 2) for c in output.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == expected


def test_token_ids_are_a_prompt_too(client, llm):
    tokens = llm.engine.tokenize(PROMPT)
    (expected,) = offline(llm, PROMPT)
    for prompt in (tokens, [tokens]):
        (choice,) = client.completions.create(model="tiny", prompt=prompt, **GREEDY).choices
        assert choice.text == expected.text


def test_streamed_completions(client, llm):
    prompts = [PROMPT, "7+8="]
    texts, reasons, usage = {}, {}, None
    for event in client.completions.create(
        model="tiny", prompt=prompts, stream=True, stream_options={"include_usage": True}, **GREEDY
    ):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason
    expected = [offline(llm, prompt)[0] for prompt in prompts]
    assert [texts[i] for i in (0, 1)] == [choice.text for choice in expected]
    assert [reasons[i] for i in (0, 1)] == [choice.finish_reason.value for choice in expected]
    assert usage.completion_tokens == sum(len(choice.token_ids) for choice in expected)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_texts_and_log_probabilities(client, llm, stream):
    (expected,) = offline(llm, PROMPT, stop=("2\n",), logprobs=2)
    assert expected.stop_reason == "2\n"
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, stop=["2\n"], logprobs=2, stream=stream, **GREEDY
    )
    choices = [c for event in answer for c in event.choices] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == expected.text
    assert choices[-1].finish_reason == "stop"
    logprobs = [choice.logprobs for choice in choices]
    assert [x for part in logprobs for x in part.token_logprobs] == [
        entry.logprob for entry in expected.logprobs
    ]
    tokens = [x for part in logprobs for x in part.tokens]
    offsets = [x for part in logprobs for x in part.text_offset]
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
    tops = [x for part in logprobs for x in part.top_logprobs]
    assert all(2 <= len(top) <= 3 for top in tops)


def test_a_conversation(client, llm):
    (expected,) = offline(llm, RENDERED, logprobs=2)
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    content = choice.logprobs.content
    assert [entry.logprob for entry in content] == [e.logprob for e in expected.logprobs]
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(content)
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == expected.text


def test_a_streamed_conversation(client, llm):
    (expected,) = offline(llm, RENDERED)
    deltas = [
        event.choices[0].delta
        for event in client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, **GREEDY
        )
    ]
    assert "".join(delta.content for delta in deltas) == expected.text
    assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]


def test_the_last_message_can_be_continued(http, llm):
    messages = [{"role": "user", "content": "17+25="}]
    body = {"messages": messages, "add_generation_prompt": False}
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    assert tokens == llm.engine.tokenize("user: 17+25=\n")
    body["continue_final_message"] = True
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    assert tokens == llm.engine.tokenize("user: 17+25=")


def test_rows_come_with_openai_s_endpoints_too(client, llm):
    (expected,) = offline(llm, RENDERED)
    extra = {"return_routed_experts": True, "return_token_ids": True}
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, extra_body=extra, **GREEDY
    )
    (choice,) = answer.choices
    tokens = [*answer.prompt_token_ids, *choice.token_ids]
    record = get_format("vllm").decode(choice.routed_experts, llm.schema, tokens)
    assert (record.ids_TLK == expected.routed_experts.ids_TLK).all()
    answer = client.completions.create(model="tiny", prompt=RENDERED, extra_body=extra, **GREEDY)
    assert answer.choices[0].routed_experts == choice.routed_experts
    assert answer.choices[0].prompt_token_ids == answer.choices[0].prompt_token_ids


def test_a_streamed_completion_tells_rows_and_tokens(http, llm):
    (expected,) = offline(llm, PROMPT)
    body = {
        "prompt": PROMPT,
        "stream": True,
        "return_routed_experts": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **GREEDY,
    }
    events = read_events(http.post("/v1/completions", json=body))
    from tests.server.events import join_choice

    prompt = events[0]["choices"][0]["prompt_token_ids"]
    tokens, record = join_choice(events, 0, prompt, llm.schema)
    assert (record.ids_TLK == expected.routed_experts.ids_TLK).all()
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[-1] == len(tokens)
    assert counts == sorted(counts)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model": "other"}, "not served here"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": True}}}, "'tokenize'"),
        (
            {"extra_body": {"continue_final_message": True}},
            "continue_final_message=true needs add_generation_prompt=false",
        ),
    ],
    ids=str,
)
def test_what_is_not_served_is_an_error_of_the_package(client, change, part):
    asked = {"model": "tiny", "messages": MESSAGES, **GREEDY, **change}
    with pytest.raises(openai.APIStatusError) as raised:
        client.chat.completions.create(**asked)
    assert raised.value.status_code in (400, 404)
    assert part in str(raised.value)


def test_without_a_template_the_error_says_what_to_do(server, http):
    server.serving.chat_template = None
    try:
        answer = http.post("/v1/chat/completions", json={"messages": MESSAGES})
    finally:
        server.serving.chat_template = CHAT_TEMPLATE
    assert answer.status_code == 400
    assert "--chat-template" in answer.json()["error"]["message"]


def test_a_template_s_own_refusal_is_told(server, http):
    server.serving.chat_template = "{{ raise_exception('roles must alternate') }}"
    try:
        answer = http.post("/v1/chat/completions", json={"messages": MESSAGES})
    finally:
        server.serving.chat_template = CHAT_TEMPLATE
    assert answer.status_code == 400
    assert "roles must alternate" in answer.json()["error"]["message"]


def test_the_models_are_listed(client, llm):
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert model.route_schema["layer_ids"] == list(llm.schema.layer_ids)
    assert model.fingerprint == llm.fingerprint
