from __future__ import annotations

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routebook import AsyncClient, Client, SamplingParams
from routebook.client import Generation
from routebook.errors import (
    FormatError,
    RecordError,
    RequestError,
    SchemaMismatchError,
    ServerError,
    SpanError,
)
from routebook.routes.formats import FORMAT_NAMES
from tests.client.fake import FakeServer, error, ok
from tests.routes.strategies import make_schema

URL = "http://fake"
PROMPT = [72, 101, 108, 108, 111]
STREAMING = [name for name in FORMAT_NAMES if name != "nemo_rl"]


def client_of(server: FakeServer, **options: object) -> Client:
    return Client(URL, transport=server.transport, **options)


def check(server: FakeServer, generation: Generation, params: SamplingParams) -> None:
    """The generation is what the fake model's tables say."""
    body = server.bodies[-1]
    assert generation.prompt_token_ids == tuple(PROMPT)
    assert [choice.index for choice in generation.choices] == list(range(params.n))
    for choice in generation.choices:
        assert list(choice.token_ids) == server.sampled(body, choice.index)
        assert choice.finish_reason == "length"
        record, expected = choice.routed_experts, server.record(body, choice.index)
        assert record is not None
        assert (record.start, record.stop) == (expected.start, len(PROMPT) + params.max_tokens - 1)
        assert np.array_equal(record.ids_TLK, expected.ids_TLK)
        assert record.complete
        record.check_tokens([*PROMPT, *choice.token_ids])


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("start", [0, 2, 5])
@pytest.mark.parametrize("has_frames", [False, True])
def test_a_whole_answer_gives_the_rows_of_every_completion(name, n, start, has_frames):
    server = FakeServer(has_frames=has_frames)
    params = SamplingParams(n=n, max_tokens=4, routed_experts_prompt_start=start)
    with client_of(server, routed_experts_format=name) as client:
        check(server, client.generate(PROMPT, params), params)


@given(
    st.sampled_from(STREAMING),
    st.builds(
        SamplingParams,
        n=st.integers(1, 3),
        routed_experts_prompt_start=st.integers(0, 5),
        max_tokens=st.integers(1, 9),
    ),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.booleans(),
)
def test_the_deltas_of_a_stream_join_to_the_whole(name, params, cuts, says_start):
    n, start = params.n, params.routed_experts_prompt_start
    server = FakeServer(cuts=tuple(cuts), says_start=says_start or n > 1)
    with client_of(server, routed_experts_format=name) as client:
        with client.stream(PROMPT, params) as stream:
            chunks = list(stream)
            generation = stream.result()
        check(server, generation, params)
    for choice in generation.choices:
        deltas = [d for chunk in chunks for d in chunk.choices if d.index == choice.index]
        assert sum((delta.token_ids for delta in deltas), ()) == choice.token_ids
        rows = [delta.routed_experts for delta in deltas if delta.routed_experts is not None]
        first = start if choice.index == 0 else len(PROMPT)
        edges = [first, *[record.stop for record in rows]]
        assert [record.start for record in rows] == edges[:-1]


def test_a_text_is_tokenized_and_answered_with_text():
    server = FakeServer()
    with client_of(server) as client:
        generation = client.generate("Hello", SamplingParams(max_tokens=3))
        check(server, generation, SamplingParams(max_tokens=3))
        assert generation.choices[0].text == "abc"
        with client.stream("Hello", SamplingParams(max_tokens=3)) as stream:
            assert [chunk.choices[0].text for chunk in stream] == ["a", "b", "c"]
            assert stream.result().choices[0].text == "abc"
        assert client.tokenize("Hi") == (72, 105)
        assert client.detokenize([72, 105]) == "Hi"


def test_messages_go_through_the_models_chat_template():
    server = FakeServer()
    with client_of(server) as client:
        generation = client.generate(
            [{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=2)
        )
    assert bytes(generation.prompt_token_ids) == b"<user>Hi"
    assert generation.choices[0].text == "ab"


def test_tokens_are_answered_without_text():
    server = FakeServer()
    with client_of(server) as client:
        assert client.generate(PROMPT, SamplingParams(max_tokens=2)).choices[0].text is None
    assert server.bodies[0]["output_mode"] == "tokens"


def test_rows_that_were_not_asked_for_are_not_there():
    server = FakeServer()
    with client_of(server) as client:
        params = SamplingParams(max_tokens=2, routed_experts=False)
        generation = client.generate(PROMPT, params)
    assert generation.choices[0].routed_experts is None
    assert generation.samples() == []
    assert server.bodies[0]["return_routed_experts"] is False


def test_what_is_asked_for_reaches_the_server():
    server = FakeServer()
    params = SamplingParams(
        max_tokens=2, temperature=0.5, top_k=3, seed=7, stop=("END",), stop_token_ids=(1,)
    )
    with client_of(server, api_key="secret", model="fake") as client:
        client.generate(PROMPT, params, request_id="mine")
    [request], [body] = server.requests, server.bodies
    assert request.headers["authorization"] == "Bearer secret"
    assert (body["request_id"], body["model"], body["token_ids"]) == ("mine", "fake", PROMPT)
    assert body["sampling_params"] == {
        "n": 1,
        "max_tokens": 2,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 3,
        "min_p": 0.0,
        "seed": 7,
        "stop": ["END"],
        "stop_token_ids": [1],
        "ignore_eos": False,
    }


def test_a_form_without_schema_asks_for_it_once_or_is_told():
    server = FakeServer()
    with client_of(server, routed_experts_format="vllm") as client:
        client.generate(PROMPT, SamplingParams(max_tokens=2))
        client.generate(PROMPT, SamplingParams(max_tokens=2))
        assert client.schema() == server.schema
    paths = [request.url.path for request in server.requests]
    assert paths == ["/v1/models", "/inference/v1/generate", "/inference/v1/generate"]
    with client_of(server, routed_experts_format="vllm", schema=server.schema) as client:
        client.generate(PROMPT, SamplingParams(max_tokens=2))
    assert server.requests[-2].url.path == "/inference/v1/generate"


def test_a_server_that_does_not_tell_its_schema_is_named():
    server = FakeServer(ok({"data": [{"id": "fake"}]}))
    with (
        client_of(server, routed_experts_format="vllm") as client,
        pytest.raises(ServerError, match=r"does not tell the schema.*pass schema="),
    ):
        client.generate(PROMPT)


def test_another_schema_than_the_servers_is_refused():
    with (
        client_of(FakeServer(), schema=make_schema(num_experts=17)) as client,
        pytest.raises(SchemaMismatchError, match="num_experts=16"),
    ):
        client.generate(PROMPT, SamplingParams(max_tokens=3))


def test_samples_are_ready_for_a_file():
    with client_of(FakeServer()) as client:
        generation = client.generate("Hello", SamplingParams(n=2, max_tokens=3))
    first, second = generation.samples()
    assert list(second.prompt_token_ids) == PROMPT
    assert second.record == generation.choices[1].routed_experts
    assert second.meta == {"request_id": generation.request_id, "index": "1", "text": "hij"}
    assert first.meta["text"] == "abc"


def test_a_completion_aborted_before_its_first_token_has_no_rows():
    choice = {"index": 0, "token_ids": [], "finish_reason": "abort"}
    with client_of(FakeServer(ok({"request_id": "r", "choices": [choice]}))) as client:
        [only] = client.generate(PROMPT).choices
    assert (only.token_ids, only.finish_reason, only.routed_experts) == ((), "abort", None)


CHOICE = {"index": 0, "token_ids": [97], "finish_reason": "length"}


@pytest.mark.parametrize(
    ("answer", "kind", "word"),
    [
        ({"choices": [CHOICE]}, ServerError, "without routed experts"),
        ({"choices": []}, ServerError, "completion 0 has not ended"),
        ({"choices": [{**CHOICE, "finish_reason": None}]}, ServerError, "has not ended"),
        ({"choices": [CHOICE, CHOICE]}, FormatError, "had ended"),
        ({"choices": [{**CHOICE, "index": 1}]}, FormatError, "completion 1, which was not asked"),
        ({"choices": [{**CHOICE, "token_ids": "ab"}]}, FormatError, "not what was expected"),
        ({"choices": [{**CHOICE, "routed_experts_error": "3 absent"}]}, RecordError, "3 absent"),
        ({"choices": [{**CHOICE, "routed_experts": "x"}]}, FormatError, "must be an object"),
        ([], FormatError, "not what was expected"),
    ],
)
def test_an_answer_without_what_was_asked_for_is_refused(answer, kind, word):
    with client_of(FakeServer(ok(answer))) as client, pytest.raises(kind, match=word):
        client.generate(PROMPT, SamplingParams(max_tokens=1))


@pytest.mark.parametrize("prompt", [[1, "x"], [[1, 2]], 7, [1, None]])
def test_a_prompt_of_another_kind_is_refused_before_anything_is_sent(prompt):
    server = FakeServer()
    with client_of(server) as client, pytest.raises(RequestError, match="a text, token ids or"):
        client.generate(prompt)
    assert server.requests == []


def test_a_start_behind_the_prompt_is_refused_before_anything_is_sent():
    server = FakeServer()
    with client_of(server) as client, pytest.raises(RequestError, match="prompt_start=6 lies"):
        client.generate(PROMPT, SamplingParams(routed_experts_prompt_start=6))
    assert server.requests == []


def test_frames_of_another_prompt_or_start_are_refused():
    other = FakeServer()
    body = {
        "token_ids": [1, 2, 3],
        "request_id": "r",
        "output_mode": "tokens",
        "sampling_params": {"n": 1, "max_tokens": 2},
    }
    [frame] = other.frames(body)

    def answer(data: bytes) -> FakeServer:
        response = ok(None)
        response.headers["content-type"] = "application/vnd.routebook"
        response._content = data
        return FakeServer(response)

    with client_of(answer(frame)) as client, pytest.raises(FormatError, match="another prompt"):
        client.generate(PROMPT)
    with (
        client_of(answer(frame)) as client,
        pytest.raises(SpanError, match=r"\[0, 4\) came, where"),
    ):
        client.generate([1, 2, 3], SamplingParams(routed_experts_prompt_start=1))
    with client_of(answer(frame[:-1])) as client, pytest.raises(FormatError, match="a frame takes"):
        client.generate([1, 2, 3])
    with client_of(answer(frame * 2)) as client, pytest.raises(FormatError, match="2 completions"):
        client.generate([1, 2, 3])
    with client_of(answer(frame * 2)) as client, pytest.raises(FormatError, match="came twice"):
        client.generate([1, 2, 3], SamplingParams(n=2))


def test_the_async_client_gives_the_same():
    server = FakeServer()
    params = SamplingParams(n=2, max_tokens=4)

    async def main() -> None:
        async with AsyncClient(URL, transport=server.transport) as client:
            whole = await client.generate("Hello", params, request_id="a")
            check(server, whole, params)
            async with client.stream("Hello", params, request_id="a") as stream:
                chunks = [chunk async for chunk in stream]
                joined = await stream.result()
            assert len(chunks) == 8
            for one, other in zip(whole.choices, joined.choices, strict=True):
                assert one.routed_experts == other.routed_experts
                assert (one.text, one.token_ids) == (other.text, other.token_ids)
            assert await client.tokenize("Hi") == (72, 105)
            assert await client.detokenize([72, 105]) == "Hi"
            assert await client.schema() == server.schema

    anyio.run(main)


def test_an_error_in_a_stream_is_raised():
    server = FakeServer(change=lambda events: [*events[:2], {"error": {"message": "out of luck"}}])
    with (
        client_of(server) as client,
        client.stream(PROMPT) as stream,
        pytest.raises(ServerError, match="gave up on the request: out of luck"),
    ):
        list(stream)


@pytest.mark.parametrize("status", [400, 404, 406, 413, 422])
def test_the_callers_mistakes_are_told_in_the_servers_words(status):
    with (
        client_of(FakeServer(error(status, "top_p=7"))) as client,
        pytest.raises(RequestError, match="refused the request: top_p=7"),
    ):
        client.generate(PROMPT)
