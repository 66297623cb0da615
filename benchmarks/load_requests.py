"""Requests for a server under load, how they are sent, and what must be true of their answers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from routebook.client import AsyncClient
from routebook.client.outputs import Choice, Generation
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import RoutebookError
from routebook.routes import RoutedExperts

PATH = "/inference/v1/generate"
FORMATS = ("frame", "vllm", "sglang", "skyrl", "prime_rl", "nemo_rl")
WHOLE_ONLY = frozenset({"nemo_rl"})
FIXED = tuple(tuple(random.Random(n).choices(range(3, 500), k=8 + 5 * n)) for n in range(8))
"""Prompts that are completed greedily, so that their rows are known beforehand."""
FIXED_TOKENS = 40
FIXED_PARAMS = SamplingParams(temperature=0, max_tokens=FIXED_TOKENS, ignore_eos=True)
_MOST_TOLD = 10

Expected = Mapping[tuple[int, ...], np.ndarray]
"""Fixed prompt -> its greedy rows, (P + FIXED_TOKENS - 1, L, K) expert ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request, and what its client does."""

    prompt: tuple[int, ...]
    params: SamplingParams
    stream: bool
    format: str
    leaves_after: float | None
    """Seconds after which the client cuts the connection, without a word; None reads the answer to its end."""


@dataclass(slots=True)
class Tally:
    """What came of many requests."""

    counts: Counter[str] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)
    """What went wrong, the first few."""
    seconds: list[float] = field(default_factory=list)
    """From sending to the last byte, of each answer that was read to its end."""

    def add(self, other: Tally) -> None:
        self.counts += other.counts
        self.losses = (self.losses + other.losses)[:_MOST_TOLD]


def draw_measured(draw: random.Random) -> Request:
    """A request of those whose latency counts: without rows, read to its end."""
    return _request(draw, rows=False, leaves=False)


def draw_other(draw: random.Random, *, rows: bool) -> Request:
    """A request of the others: half of them leave, half of them ask for rows where `rows` lets them.

    The same draws give the same requests with and without rows.
    """
    asks, leaves = draw.random() < 0.5, draw.random() < 0.5
    return _request(draw, rows=asks and rows, leaves=leaves)


def _request(draw: random.Random, *, rows: bool, leaves: bool) -> Request:
    stream, route_format = draw.random() < 0.5, draw.choice(FORMATS)
    prompt = tuple(draw.choices(range(3, 500), k=draw.randint(8, 64)))
    params: dict[str, Any] = {
        "max_tokens": draw.randint(16, 64),
        "seed": draw.getrandbits(32),
        "n": draw.choice((1, 1, 1, 2)),
        "routed_experts_prompt_start": draw.choice((0, 0, len(prompt) // 2, len(prompt))),
    }
    leaves_after = draw.uniform(0.0, 0.6)
    if draw.random() < 0.4:
        prompt = draw.choice(FIXED)
        params = {"max_tokens": FIXED_TOKENS, "temperature": 0}
    return Request(
        prompt=prompt,
        params=SamplingParams(ignore_eos=True, routed_experts=rows, **params),
        stream=stream and route_format not in WHOLE_ONLY,
        format=route_format,
        leaves_after=leaves_after if leaves else None,
    )


async def run_load(
    url: str, draw: Callable[[], Request], expected: Expected, num_clients: int, seconds: float
) -> Tally:
    """So many clients send one request after the other; none begins after `seconds`."""
    tally, end = Tally(), time.monotonic() + seconds
    clients = {
        name: AsyncClient(url, routed_experts_format=name, timeout=120.0) for name in FORMATS
    }

    async def one_client() -> None:
        while time.monotonic() < end:
            await _do(clients, url, draw(), expected, tally)

    try:
        await asyncio.gather(*(one_client() for _ in range(num_clients)))
    finally:
        for client in clients.values():
            await client.aclose()
    return tally


async def _do(
    clients: dict[str, AsyncClient], url: str, request: Request, expected: Expected, tally: Tally
) -> None:
    tally.counts["streamed" if request.stream else "whole"] += 1
    tally.counts["asked for rows"] += request.params.routed_experts
    if request.leaves_after is not None:
        was_in_time = await _leave(url, request)
        tally.counts["left" if was_in_time else "meant to leave, but had all before"] += 1
        return
    began = time.perf_counter()
    try:
        generation = await _read(clients[request.format], request)
        tally.seconds.append(time.perf_counter() - began)
        faults = faults_of(request, generation, expected)
    except RoutebookError as error:
        faults = [f"{type(error).__name__}: {error}"]
    if faults:
        tally.counts["lost"] += 1
        tally.losses = [*tally.losses, f"{faults[0]} ({request})"][:_MOST_TOLD]
        return
    tally.counts["finished"] += 1
    records = [c.routed_experts for c in generation.choices if c.routed_experts is not None]
    tally.counts["records checked"] += len(records)
    tally.counts["rows checked"] += sum(record.num_rows for record in records)
    if request.prompt in expected:
        tally.counts["records compared with the engine's own"] += len(records)


async def _read(client: AsyncClient, request: Request) -> Generation:
    if not request.stream:
        return await client.generate(request.prompt, request.params)
    async with client.stream(request.prompt, request.params) as stream:
        return await stream.result()


async def _leave(url: str, request: Request) -> bool:
    """Send a request, read for a while, cut the connection; whether that was before the answer's end."""
    params = request.params
    body = {
        "token_ids": request.prompt,
        "stream": request.stream,
        "sampling_params": {"max_tokens": params.max_tokens, "n": params.n, "ignore_eos": True},
        "return_routed_experts": params.routed_experts,
        "routed_experts_format": request.format,
    }
    text = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: load\r\ncontent-type: application/json\r\nconnection: close\r\n"
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").rsplit(":", 1))
    try:
        writer.write(f"{head}content-length: {len(text)}\r\n\r\n".encode() + text)
        with suppress(TimeoutError):
            await asyncio.wait_for(_drain(reader), request.leaves_after)
            return False
        return True
    finally:
        writer.transport.abort()


async def _drain(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


def faults_of(request: Request, generation: Generation, expected: Expected) -> list[str]:
    """What is wrong with an answer; that its rows are those of its tokens the client has checked by their hashes."""
    if len(generation.choices) != request.params.n:
        return [f"{len(generation.choices)} completions instead of {request.params.n}"]
    faults = (_fault(request, choice, expected) for choice in generation.choices)
    return [fault for fault in faults if fault is not None]


def _fault(request: Request, choice: Choice, expected: Expected) -> str | None:
    params, record = request.params, choice.routed_experts
    if len(choice.token_ids) != params.max_tokens or choice.finish_reason != "length":
        return f"{len(choice.token_ids)} tokens, then {choice.finish_reason}"
    if (record is not None) != params.routed_experts:
        return "no rows" if record is None else "rows that nobody asked for"
    return None if record is None else _fault_of_rows(request, record, expected)


def _fault_of_rows(request: Request, record: RoutedExperts, expected: Expected) -> str | None:
    params = request.params
    start = params.routed_experts_prompt_start
    num_rows = len(request.prompt) + params.max_tokens - 1 - start
    if (record.start, record.num_rows) != (start, num_rows):
        return f"rows [{record.start}, {record.stop}) instead of {num_rows} from {start} on"
    if not record.complete:
        return f"{(~record.valid_T).sum()} rows are absent"
    if request.prompt in expected and not np.array_equal(record.ids_TLK, expected[request.prompt]):
        return "other rows than the engine's own"
    return None
