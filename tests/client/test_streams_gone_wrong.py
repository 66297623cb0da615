from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routebook import Client, SamplingParams
from routebook.client.event_stream import EventDecoder
from routebook.errors import (
    FormatError,
    RecordError,
    RoutebookError,
    ServerError,
    SpanError,
    TokenMismatchError,
    UnreachableError,
)
from tests.client.fake import Event, FakeServer, sse

PROMPT = [72, 101, 108, 108, 111]
PARAMS = SamplingParams(max_tokens=5)


def outcome(change, name: str = "frame", params: SamplingParams = PARAMS):
    """The rows of a stream whose events were changed on the way."""
    server = FakeServer(change=change)
    with (
        Client("http://fake", transport=server.transport, routed_experts_format=name) as client,
        client.stream(PROMPT, params) as stream,
    ):
        return stream.result()


def rows_of(events: list[Event], index: int) -> Event:
    return events[index]["choices"][0]


def dropped(events: list[Event]) -> list[Event]:
    return [*events[:2], *events[3:]]


def doubled(events: list[Event]) -> list[Event]:
    return [*events[:3], *events[2:]]


def swapped(events: list[Event]) -> list[Event]:
    return [events[0], events[2], events[1], *events[3:]]


def without_rows(events: list[Event]) -> list[Event]:
    del rows_of(events, 2)["routed_experts"]
    return events


def without_last_rows(events: list[Event]) -> list[Event]:
    del rows_of(events, 4)["routed_experts"]
    return events


def with_another_token(events: list[Event]) -> list[Event]:
    rows_of(events, 1)["token_ids"] = [7]
    return events


def with_an_extra_token(events: list[Event]) -> list[Event]:
    rows_of(events, 1)["token_ids"].append(7)
    return events


def with_rows_of_the_event_before(events: list[Event]) -> list[Event]:
    rows_of(events, 3)["routed_experts"] = rows_of(events, 2)["routed_experts"]
    return events


def with_a_false_start(events: list[Event]) -> list[Event]:
    rows_of(events, 2)["routed_experts_start"] += 1
    return events


def after_the_end(events: list[Event]) -> list[Event]:
    return [*events, events[-1]]


def cut(events: list[Event]) -> list[Event]:
    return events[:3]


@pytest.mark.parametrize(
    ("change", "kind", "word"),
    [
        (dropped, SpanError, "begin at position 7, but the next one would be 6; some are missing"),
        (doubled, SpanError, "begin at position 6, but the next one would be 7; some came twice"),
        (swapped, SpanError, "some are missing"),
        (without_rows, SpanError, "begin at position 7, but the next one would be 6; some are mis"),
        (without_last_rows, SpanError, "end at position 8, but its 10 tokens have rows up to 9"),
        (with_another_token, TokenMismatchError, "position 6 was computed for another token than"),
        (with_an_extra_token, SpanError, "end at position 6, but those of 8 tokens end at 7"),
        (with_rows_of_the_event_before, SpanError, "begin at position 6, not at start=7"),
        (with_a_false_start, SpanError, "begin at position 7, but the next one would be 6"),
        (after_the_end, FormatError, "completion 0, which was not asked for or had ended"),
        (cut, ServerError, "completion 0 has not ended"),
    ],
)
def test_a_stream_that_was_changed_on_the_way_is_refused(change, kind, word):
    with pytest.raises(kind, match=word):
        outcome(change)


@pytest.mark.parametrize("name", ["vllm", "sglang", "skyrl", "prime_rl", "frame"])
@pytest.mark.parametrize(
    "change", [dropped, doubled, swapped, with_an_extra_token, without_last_rows, cut]
)
def test_no_form_of_rows_lets_it_pass(name, change):
    with pytest.raises(RoutebookError):
        outcome(change, name)


@given(st.permutations(range(5)), st.integers(0, 5))
def test_events_in_another_order_or_number_never_join(order, count):
    if [*order[:count]] == list(range(5)):
        return
    with pytest.raises(RoutebookError):
        outcome(lambda events: [events[i] for i in order[:count]])


def test_shared_rows_that_the_first_completion_never_sent_are_refused():
    def change(events: list[Event]) -> list[Event]:
        for event in events:
            if event["choices"][0]["index"] == 0:
                event["choices"][0]["routed_experts"] = None
        return events

    with pytest.raises(ServerError, match="completion 0 came without"):
        outcome(change, params=SamplingParams(n=2, max_tokens=3))


def test_shared_rows_of_a_first_completion_that_has_none_are_refused():
    def change(events: list[Event]) -> list[Event]:
        first = {"index": 0, "token_ids": [], "finish_reason": "abort"}
        others = [event for event in events if event["choices"][0]["index"] == 1]
        return [{"choices": [first]}, *others]

    with pytest.raises(SpanError, match=r"rows \[0, 5\) were left out, and not sent before"):
        outcome(change, params=SamplingParams(n=2, max_tokens=3))


@pytest.mark.parametrize("start", [1, 6])
def test_the_first_completion_may_not_leave_rows_out(start):
    def change(events: list[Event]) -> list[Event]:
        rows_of(events, 0)["routed_experts_start"] = start
        return events

    with pytest.raises(SpanError, match=f"completion 0 begin at position {start}, but"):
        outcome(change)


def test_rows_left_out_behind_the_prompt_are_refused():
    def change(events: list[Event]) -> list[Event]:
        return [event for event in events if event not in events[1:4:2]]

    with pytest.raises(RecordError, match="completion 1 begin at position 6, but"):
        outcome(change, params=SamplingParams(n=2, max_tokens=4))


class Broken(httpx.SyncByteStream):
    def __init__(self, *pieces: bytes, error: Exception | None = None) -> None:
        self.pieces = pieces
        self.error = error

    def __iter__(self) -> Iterator[bytes]:
        yield from self.pieces
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [None, httpx.ReadTimeout("slow"), httpx.ReadError("reset")])
def test_a_stream_that_breaks_off_is_named_and_aborted(error):
    event = b'data: {"request_id": "theirs", "choices": []}\n\n'
    server = FakeServer(httpx.Response(200, stream=Broken(event, error=error)))
    with (
        Client("http://fake", transport=server.transport) as client,
        pytest.raises(UnreachableError, match="the stream broke off"),
        client.stream(PROMPT, request_id="mine") as stream,
    ):
        list(stream)
    assert server.requests[-1].url.path == "/inference/v1/abort_requests"
    assert server.bodies[-1] == {"request_ids": ["mine", "theirs"]}


def test_leaving_a_stream_early_aborts_it_and_reading_it_to_the_end_does_not():
    server = FakeServer()
    with Client("http://fake", transport=server.transport) as client:
        with client.stream(PROMPT, PARAMS, request_id="mine") as stream:
            next(iter(stream))
        assert server.bodies[-1]["request_ids"][0] == "mine"
        with client.stream(PROMPT, PARAMS) as stream:
            stream.result()
    assert server.requests[-1].url.path == "/inference/v1/generate"


def test_a_server_that_cannot_be_told_to_stop_hides_no_error():
    server = FakeServer(
        httpx.Response(200, stream=Broken(error=httpx.ReadError("reset"))),
        httpx.ConnectError("gone"),
    )
    with (
        Client("http://fake", transport=server.transport) as client,
        pytest.raises(UnreachableError, match="broke off"),
        client.stream(PROMPT) as stream,
    ):
        list(stream)
    assert len(server.requests) == 2


@given(st.lists(st.integers(1, 400), max_size=20), st.sampled_from([b"\n", b"\r\n"]))
def test_events_are_the_same_however_the_bytes_are_cut(sizes, newline):
    events: list[Event] = [{"a": 1}, {"b": "x" * 300}, {"c": "\u00e9\\n"}]
    data = b"".join(sse(events)).replace(b"\n", newline)
    edges = [0, *np.cumsum(sizes).tolist(), len(data)]
    decoder = EventDecoder()
    found = [
        event for a, b in pairwise(edges) for event in decoder.feed(data[a:b] if b > a else b"")
    ]
    assert [json.loads(event) for event in found[:-1]] == events
    assert found[-1] == b"[DONE]"


def test_data_of_several_lines_is_one_event_and_other_fields_are_passed_over():
    decoder = EventDecoder()
    text = b"event: x\nid: 1\ndata: a\ndata:b\n\n:comment\n\n\ndata: c\n\ndata: unfinished"
    assert list(decoder.feed(text)) == [b"a\nb", b"c"]
