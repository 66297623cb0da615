"""A server of a model that does not exist: what it answers is known beforehand, and it can be told to misbehave.

It answers `/inference/v1/generate` as vLLM documents it, with the fields that carry rows, from tables instead of a
model. Rows are written by `tests.routes.peers`, not by the formats that the client reads them with, except in
Routebook's own forms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np

from routebook.routes import RoutedExperts, RouteSample, RouteSchema, encode_frame
from routebook.routes.formats import FRAME_MEDIA_TYPE, get_format
from tests.routes import peers
from tests.routes.strategies import make_schema, random_ids

Outcome = httpx.Response | Exception
Event = dict[str, Any]


class FakeServer:
    """Handles requests of an `httpx.MockTransport`, and remembers them.

    Args:
        script: outcomes of the first requests, before it answers properly.
        cuts: how many tokens each event of a stream brings; the last one repeats.
        change: what is done to the events of a stream before they are sent.
    """

    def __init__(
        self,
        *script: Outcome,
        schema: RouteSchema | None = None,
        cuts: tuple[int, ...] = (1,),
        change: Callable[[list[Event]], list[Event]] = lambda events: events,
        has_frames: bool = True,
        says_start: bool = True,
    ) -> None:
        self.schema = schema or make_schema()
        self.script = list(script)
        self.cuts = cuts
        self.change = change
        self.has_frames = has_frames
        self.says_start = says_start
        self.requests: list[httpx.Request] = []

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self)

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(request.content or b"null") for request in self.requests]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.script:
            outcome = self.script.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return copied(outcome) if outcome.is_closed else outcome
        body = json.loads(request.content or b"null")
        answer: Callable[[Any], httpx.Response] = {
            "/inference/v1/generate": lambda body: self.generate(body, request),
            "/inference/v1/abort_requests": lambda body: httpx.Response(200),
            "/tokenize": self.tokenize,
            "/detokenize": lambda body: ok({"prompt": "".join(map(chr, body["tokens"]))}),
            "/v1/models": self.models,
        }[request.url.path]
        return answer(body)

    def tokenize(self, body: Any) -> httpx.Response:
        text = body.get("prompt") or "".join(
            f"<{m['role']}>{m['content']}" for m in body["messages"]
        )
        return ok({"tokens": [ord(c) for c in text], "count": len(text), "max_model_len": 99})

    def models(self, body: Any) -> httpx.Response:
        schema = {name: getattr(self.schema, name) for name in ("num_experts", "top_k")}
        schema |= {"num_hidden_layers": self.schema.num_hidden_layers}
        return ok(
            {
                "data": [
                    {"id": "fake", "route_schema": {**schema, "layer_ids": self.schema.layer_ids}}
                ]
            }
        )

    def generate(self, body: Any, request: httpx.Request) -> httpx.Response:
        if body["stream"]:
            data = b"".join(sse(self.change(self.events(body))))
            return httpx.Response(200, stream=httpx.ByteStream(data))
        if self.has_frames and FRAME_MEDIA_TYPE in request.headers["accept"]:
            data = b"".join(self.frames(body))
            return httpx.Response(200, content=data, headers={"content-type": FRAME_MEDIA_TYPE})
        choices = [self.choice(body, index) for index in range(body["sampling_params"]["n"])]
        return ok({"request_id": f"fake-{body['request_id']}", "choices": choices})

    def sampled(self, body: Any, index: int) -> list[int]:
        """Tokens of a completion: the alphabet, from another letter on for each."""
        count = body["sampling_params"]["max_tokens"]
        return [ord("a") + (index * 7 + i) % 26 for i in range(count)]

    def record(self, body: Any, index: int) -> RoutedExperts:
        """All rows of a completion; those of the prompt are the same in all."""
        prompt = body["token_ids"]
        tokens = [*prompt, *self.sampled(body, index)]
        ids = random_ids(self.schema, len(tokens) - 1, seed=3)
        if index:
            own = random_ids(self.schema, len(tokens) - 1, seed=4 + 2 * index)
            ids[len(prompt) :] = own[len(prompt) :]
        record = RoutedExperts.from_rows(self.schema, ids, tokens)
        return record.slice(first_row(body), record.stop)

    def choice(self, body: Any, index: int) -> Event:
        tokens = self.sampled(body, index)
        return {
            "index": index,
            "token_ids": tokens,
            "text": "".join(map(chr, tokens)) if body["output_mode"] == "text" else None,
            "finish_reason": "length",
            "stop_reason": None,
            "logprobs": None,
            **self.rows(body, self.record(body, index)),
        }

    def rows(self, body: Any, record: RoutedExperts) -> Event:
        if not body["return_routed_experts"]:
            return {}
        start = {"routed_experts_start": record.start} if self.says_start else {}
        return {"routed_experts": write(body["routed_experts_format"], record), **start}

    def events(self, body: Any) -> list[Event]:
        """A stream, the completions by turns; shared prompt rows are only in the first one's."""
        n, prompt = body["sampling_params"]["n"], body["token_ids"]
        records = [self.record(body, index) for index in range(n)]
        wholes = [self.choice(body, index) for index in range(n)]
        next_row = [first_row(body), *[len(prompt)] * (n - 1)]
        return [
            self.event(body, wholes[index], records[index], next_row, span)
            for span in spans(self.cuts, len(wholes[0]["token_ids"]))
            for index in range(n)
        ]

    def event(
        self,
        body: Any,
        whole: Event,
        record: RoutedExperts,
        next_row: list[int],
        span: tuple[int, int],
    ) -> Event:
        """The tokens of a span of one completion, and the rows that became known with them."""
        a, b = span
        index, ended = whole["index"], b == len(whole["token_ids"])
        stop = len(body["token_ids"]) + b - 1
        start = max(next_row[index], record.start)
        has_told = next_row[index] > max(record.start, len(body["token_ids"]) if index else 0)
        told_now = stop > start or (ended and not has_told)
        rows = self.rows(body, record.slice(start, max(start, stop))) if told_now else {}
        next_row[index] = max(stop, start)
        text = whole["text"] and whole["text"][a:b]
        choice = {
            "index": index,
            "token_ids": whole["token_ids"][a:b],
            "text": text,
            "finish_reason": whole["finish_reason"] if ended else None,
            **rows,
        }
        return {"request_id": f"fake-{body['request_id']}", "choices": [choice]}

    def frames(self, body: Any) -> Iterator[bytes]:
        for index in range(body["sampling_params"]["n"]):
            choice = self.choice({**body, "return_routed_experts": False}, index)
            meta = {"index": str(index), "finish_reason": choice["finish_reason"]}
            if choice["text"] is not None:
                meta["text"] = choice["text"]
            sample = RouteSample(
                record=self.record(body, index),
                token_ids=np.array([*body["token_ids"], *choice["token_ids"]], np.int32),
                num_prompt_tokens=len(body["token_ids"]),
                meta={"request_id": f"fake-{body['request_id']}", **meta},
            )
            yield encode_frame(sample, checksum=True)


def write(name: str, record: RoutedExperts) -> Any:
    return get_format(name).encode(record) if name == "frame" else peers.write(name, record)


def first_row(body: Any) -> int:
    first: int = body["sampling_params"].get("routed_experts_prompt_start", 0)
    return first


def spans(cuts: tuple[int, ...], total: int) -> Iterator[tuple[int, int]]:
    a = turn = 0
    while a < total:
        b = min(total, a + cuts[min(turn, len(cuts) - 1)])
        yield a, b
        a, turn = b, turn + 1


def sse(events: list[Event]) -> Iterator[bytes]:
    yield b": a comment\n\n"
    for event in events:
        yield b"data: " + json.dumps(event).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def copied(response: httpx.Response) -> httpx.Response:
    """A response can be sent once; those of a script are used by several tests."""
    status, headers = response.status_code, response.headers
    return httpx.Response(status, headers=headers, content=response.content)


def ok(value: Any) -> httpx.Response:
    return httpx.Response(200, json=value)


def error(status: int, message: str, **headers: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message}}, headers=headers)
