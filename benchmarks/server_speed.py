"""What does an answer with rows cost the server, and how long does its event loop stand still?

    python -m benchmarks.server_speed

Answers of 4096 tokens (1024 of a prompt) with rows of 48 layers and 8 experts of 128, from an engine that has them
ready, through the real server and over loopback. Against it, a bare application under the same uvicorn and uvloop,
which does `np.save`, base64 and JSON in its endpoint, on the event loop. Each server is a process of its own; the
ways take turns of some answers, and a ratio compares two turns of one round. CPU time is that of all threads of
the server's process, as the kernel counts it.

The second part watches turns of the event loop (one pass over all that is ready) while several clients ask at
once. Wall time is that of a busy machine; so it is also told for those turns in which the kernel took the
processor away from no one but who waited by himself, and as CPU time of the loop's thread. A loop that is watched
never sleeps, so the first part is measured without.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import io
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from resource import RUSAGE_THREAD, getrusage
from statistics import median
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from benchmarks.executor_speed import process_time_of
from benchmarks.results import describe_run, spread, write_result
from benchmarks.served_process import loaded
from routebook.client import Client
from routebook.engine.increments import Increment, IncrementRows
from routebook.engine.outputs import CompletionOutput, RequestOutput
from routebook.engine.request import FinishReason
from routebook.engine.sampling_params import SamplingParams
from routebook.engine.served_model import ServedModel
from routebook.ledger.base import RowRange
from routebook.routes import RoutedExperts, RouteSchema
from routebook.routes.formats import FRAME_MEDIA_TYPE
from routebook.routes.provenance import Origin
from routebook.server.app import make_app
from routebook.server.config import ServerConfig
from routebook.server.connection import stalling_protocol
from routebook.server.engine_client import EngineClient
from routebook.server.run import _SWITCH_S
from routebook.server.serving import Serving

SCHEMA = RouteSchema(layer_ids=tuple(range(48)), num_experts=128, top_k=8, num_hidden_layers=48)
TOKENS, PROMPT = 4096, 1024
TURN, CLIENTS = 10, 8
PLAIN = "np.save, base64, JSON on the event loop"
PATH = "/inference/v1/generate"
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    PLAIN: ("plain", {}, {}),
    "vllm in JSON": ("routebook", {}, {}),
    "frames": ("routebook", {}, {"accept": FRAME_MEDIA_TYPE}),
    "vllm in a stream, all rows in one event": ("routebook", {"stream": True}, {}),
    "no rows": ("routebook", {"return_routed_experts": False}, {}),
}
"""Name of a way -> server, fields of the request beside the usual ones, headers."""
Ids = np.ndarray[Any, np.dtype[np.uint8]]
_MOST_RATIO, _MOST_BLOCKED_MS = 0.2, 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--name", default="server_speed", help="of the file of results")
    arguments = parser.parse_args()
    packages = ("numpy", "msgspec", "pybase64", "fastapi", "starlette", "uvicorn", "uvloop")
    with running("plain") as plain, running("routebook") as routebook:
        servers = {"plain": plain, "routebook": routebook}
        check(servers)
        result = describe_run(packages) | {"tokens": TOKENS, "machine_load": loaded()}
        result |= costs(servers, arguments.rounds)
        result["turns_of_the_event_loop"] = watch(servers)
    print(f"wrote {write_result(arguments.name, result)}")
    sys.exit(tell(result))


def rows() -> Ids:
    """Rows of the answer, (T - 1, L, K) uint8: random, and of 8 different experts each."""
    draw = np.random.default_rng(0)
    first_TL1, step_TL1 = draw.integers(0, 64, (2, TOKENS - 1, 48, 1), dtype=np.uint8)
    ids_TLK = first_TL1 + (2 * step_TL1 + 1) * np.arange(8, dtype=np.uint8)
    return ids_TLK % np.uint8(128)


class FakeEngine:
    """An engine that has every answer ready."""

    tokenizer = None
    is_paused = False
    has_failed = False
    schema = SCHEMA
    max_model_len = 2**17
    config = SimpleNamespace(scheduler=SimpleNamespace(max_num_seqs=256))
    scheduler = SimpleNamespace(num_preemptions=0, weight_version=0, requests={})

    def __init__(self) -> None:
        self.served = ServedModel(
            name="fake",
            fingerprint="none",
            dtype="float32",
            schema=SCHEMA,
            vocab_size=TOKENS,
            eos_token_ids=frozenset(),
            is_recurrent=False,
            unforcible=None,
            max_model_len=self.max_model_len,
            num_blocks=1,
        )
        self._token_ids = tuple(range(TOKENS))
        self._record = RoutedExperts.from_rows(SCHEMA, rows(), self._token_ids)
        self._num_requests = 0
        self._waiting: dict[str, SamplingParams] = {}
        self._streamed: dict[str, SamplingParams] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    can_advance = has_work

    def add_request(
        self,
        token_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
        *,
        streamed: bool,
        cache_salt: str,
    ) -> str:
        self._num_requests += 1
        request_id = str(self._num_requests)
        (self._streamed if streamed else self._waiting)[request_id] = params
        return request_id

    def step(self) -> list[RequestOutput]:
        waiting, self._waiting = self._waiting, {}
        return [self._output(request_id, params) for request_id, params in waiting.items()]

    def take_increments(self, request_id: str) -> list[Increment]:
        """All of it at once, with rows that are a copy, as they are when they come from a ledger."""
        record = self._record
        del self._streamed[request_id]
        taken = RowRange(
            start=0,
            ids_TLK=record.ids_TLK.copy(),
            origin_T=np.full(record.num_rows, Origin.DECODE, np.uint8),
            version_T=np.zeros(record.num_rows, np.uint32),
        )
        return [
            Increment(
                index=0,
                token_ids=self._token_ids[PROMPT:],
                text="",
                logprobs=None,
                rows=IncrementRows(SCHEMA, taken, 0, record.token_hash_T),
                finish_reason=FinishReason.LENGTH,
                stop_reason=None,
            )
        ]

    def forget(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    def shutdown(self) -> None:
        self._waiting.clear()

    def _output(self, request_id: str, params: SamplingParams) -> RequestOutput:
        choice = CompletionOutput(
            index=0,
            text="",
            token_ids=self._token_ids[PROMPT:],
            finish_reason=FinishReason.LENGTH,
            stop_reason=None,
            logprobs=None,
            routed_experts=self._record if params.routed_experts else None,
        )
        return RequestOutput(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=self._token_ids[:PROMPT],
            choices=(choice,),
        )


class Turns:
    """Times of the event loop's turns while it is watched."""

    def __init__(self) -> None:
        self._is_watching = False

    async def start(self, request: Request) -> JSONResponse:
        self._is_watching = True
        self._found: list[tuple[float, float, bool]] = []
        self._last = self._now()
        asyncio.get_running_loop().call_soon(self._turn)
        return JSONResponse({})

    async def stop(self, request: Request) -> JSONResponse:
        self._is_watching = False
        wall, alone, cpu = self._found_ms()
        return JSONResponse(
            {
                "turns": len(wall),
                "longest_wall_ms": wall.max(),
                "longest_wall_ms_not_preempted": alone.max(),
                "longest_cpu_ms": cpu.max(),
                "wall_ms_of_turns_above_5_ms": np.sort(wall[wall > _MOST_BLOCKED_MS]).tolist(),
            }
        )

    def _turn(self) -> None:
        now = self._now()
        wall, cpu = now[0] - self._last[0], now[1] - self._last[1]
        if wall > 1e-4:  # shorter ones are many, and tell nothing
            self._found.append((wall, cpu, now[2] == self._last[2]))
        self._last = now
        if self._is_watching:
            asyncio.get_running_loop().call_soon(self._turn)

    def _found_ms(self) -> tuple[Any, Any, Any]:
        wall, cpu, alone = (np.array(column) for column in zip(*self._found, strict=True))
        return wall * 1e3, wall[alone] * 1e3, cpu * 1e3

    @staticmethod
    def _now() -> tuple[float, float, int]:
        return time.perf_counter(), time.thread_time(), getrusage(RUSAGE_THREAD).ru_nivcsw


def run_server(kind: str, parent: Connection) -> None:
    """The process of one server."""
    uvloop.run(_serve(kind, parent))


async def _serve(kind: str, parent: Connection) -> None:
    app, protocol = await _routebook() if kind == "routebook" else (_plain(), "httptools")
    turns = Turns()
    app.router.routes.insert(0, Route("/watch", turns.start))
    app.router.routes.insert(0, Route("/turns", turns.stop))
    config = uvicorn.Config(
        app, http=protocol, lifespan="off", log_level="warning", access_log=False
    )
    gc.collect()
    gc.freeze()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        parent.send(listener.getsockname()[1])
        await uvicorn.Server(config).serve(sockets=[listener])


async def _routebook() -> tuple[Starlette, Any]:
    sys.setswitchinterval(_SWITCH_S)
    client = await EngineClient.start(FakeEngine)  # type: ignore[arg-type] # as much of one as is used
    return make_app(Serving(client, ServerConfig())), stalling_protocol(60)


def _plain() -> Starlette:
    ids_TLK, token_ids = rows(), list(range(PROMPT, TOKENS))

    async def generate(request: Request) -> JSONResponse:
        await request.json()
        file = io.BytesIO()
        np.save(file, ids_TLK)
        text = base64.b64encode(file.getvalue()).decode()
        choice = {"index": 0, "token_ids": token_ids, "routed_experts": text}
        return JSONResponse({"request_id": "x", "choices": [choice]})

    return Starlette(routes=[Route(PATH, generate, methods=["POST"])])


class Server:
    """One of the servers, from outside."""

    def __init__(self, pid: int, url: str) -> None:
        self.pid, self.url = pid, url
        self.http = httpx.Client(base_url=url, timeout=60)

    def ask(self, way: str) -> bytes:
        _, fields, headers = WAYS[way]
        body = {
            "token_ids": list(range(PROMPT)),
            "sampling_params": {"max_tokens": TOKENS - PROMPT},
            "return_routed_experts": True,
        }
        answer = self.http.post(PATH, json=body | fields, headers=headers)
        return answer.raise_for_status().content

    def cost(self, way: str) -> float:
        """CPU seconds of an answer."""
        before = process_time_of(self.pid)
        for _ in range(TURN):
            self.ask(way)
        return (process_time_of(self.pid) - before) / TURN


@contextmanager
def running(kind: str) -> Iterator[Server]:
    context = get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=run_server, args=(kind, theirs), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield Server(process.pid, f"http://127.0.0.1:{mine.recv()}")
    finally:
        process.terminate()
        process.join()


def check(servers: dict[str, Server]) -> None:
    """All ways hand out the same rows."""
    plain = msgspec.json.decode(servers["plain"].ask(PLAIN))["choices"][0]["routed_experts"]
    found = [np.load(io.BytesIO(base64.b64decode(plain)))]
    params = SamplingParams(max_tokens=TOKENS - PROMPT)
    for name in ("vllm", "frame"):
        with Client(servers["routebook"].url, schema=SCHEMA, routed_experts_format=name) as client:
            answers = [client.generate(range(PROMPT), params)]
            with client.stream(range(PROMPT), params) as stream:
                answers.append(stream.result())
        found += [sample.record.ids_TLK for answer in answers for sample in answer.samples()]
    assert len(found) == 5
    assert all(np.array_equal(ids_TLK, rows()) for ids_TLK in found), "other rows"


def costs(servers: dict[str, Server], rounds: int) -> dict[str, Any]:
    """CPU milliseconds of an answer in each way, in turns."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in WAYS if number % 2 else reversed(WAYS):
            seconds[way].append(servers[WAYS[way][0]].cost(way))
    # The first round makes what is made once.
    kept = {way: np.array(one[1:]) * 1e3 for way, one in seconds.items()}
    return {
        "cpu_ms_per_answer": {way: spread(one.tolist()) for way, one in kept.items()},
        "ratio_to_plain": {way: float(median(one / kept[PLAIN])) for way, one in kept.items()},
    }


def watch(servers: dict[str, Server]) -> dict[str, Any]:
    """Turns of the event loops while several clients ask at once, each way by itself."""
    found = {}
    for way, (kind, _, _) in WAYS.items():
        server = servers[kind]
        server.http.get("/watch").raise_for_status()
        with ThreadPoolExecutor(CLIENTS) as pool:
            for _ in pool.map(server.ask, [way] * CLIENTS * TURN):
                pass
        found[way] = server.http.get("/turns").raise_for_status().json()
    return found


def tell(result: dict[str, Any]) -> int:
    """Say what was found; the exit status."""
    turns, ratios = result["turns_of_the_event_loop"], result["ratio_to_plain"]
    for way, cost in result["cpu_ms_per_answer"].items():
        one = turns[way]
        print(
            f"{way}: {cost['median']:.2f} ms of CPU, {ratios[way]:.3f} of plain; longest turn"
            f" {one['longest_wall_ms']:.2f} ms, not preempted"
            f" {one['longest_wall_ms_not_preempted']:.2f}, of CPU {one['longest_cpu_ms']:.2f}"
        )
    ours = [way for way in WAYS if way != PLAIN]
    too_dear = any(ratios[way] > _MOST_RATIO for way in ours)
    blocked = any(turns[way]["longest_cpu_ms"] > _MOST_BLOCKED_MS for way in ours)
    return int(too_dear or blocked)


if __name__ == "__main__":
    main()
