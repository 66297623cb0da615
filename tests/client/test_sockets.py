"""The client over real connections: what a server sees when it is left."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from routebook import AsyncClient, Client, SamplingParams
from routebook.errors import UnreachableError

PROMPT = [1, 2, 3]
PARAMS = SamplingParams(max_tokens=1000, routed_experts=False)
PATIENCE = 10.0


class SlowServer:
    """Never comes to an end with a generation, and notes who leaves."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.left = threading.Event()
        self.aborted: list[str] = []
        self.app = Starlette(
            routes=[
                Route("/inference/v1/generate", self.generate, methods=["POST"]),
                Route("/inference/v1/abort_requests", self.abort, methods=["POST"]),
            ]
        )

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        if body["stream"]:
            return StreamingResponse(
                self.events(body["request_id"]), media_type="text/event-stream"
            )
        self.opened.set()
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        self.left.set()
        return Response(status_code=499)

    async def events(self, request_id: str):
        self.opened.set()
        try:
            while True:
                choice = {"index": 0, "token_ids": [7], "finish_reason": None}
                yield f"data: {json.dumps({'request_id': request_id, 'choices': [choice]})}\n\n"
                await asyncio.sleep(0.01)
        finally:
            self.left.set()

    async def abort(self, request: Request) -> Response:
        self.aborted += (await request.json())["request_ids"]
        return JSONResponse({})


@contextmanager
def served(app: Starlette) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def slow() -> SlowServer:
    return SlowServer()


@pytest.fixture
def url(slow) -> Iterator[str]:
    with served(slow.app) as url:
        yield url


def test_a_stream_that_is_left_early_ends_at_the_server(slow, url):
    with Client(url) as client:
        with client.stream(PROMPT, PARAMS, request_id="mine") as stream:
            chunks = iter(stream)
            assert [next(chunks).choices[0].token_ids for _ in range(3)] == [(7,)] * 3
            assert not slow.left.is_set()
        assert slow.left.wait(PATIENCE)
    assert slow.aborted == ["mine"]


def test_an_error_inside_the_block_ends_the_stream_too(slow, url):
    def work(client: Client) -> None:
        with client.stream(PROMPT, PARAMS, request_id="mine") as stream:
            for _ in stream:
                raise KeyError

    with Client(url) as client, pytest.raises(KeyError):
        work(client)
    assert slow.left.wait(PATIENCE)
    assert slow.aborted == ["mine"]


@pytest.mark.parametrize("streams", [False, True])
def test_cancelling_a_task_aborts_its_generation(slow, url, streams):
    async def work(client: AsyncClient) -> None:
        if not streams:
            await client.generate(PROMPT, PARAMS, request_id="mine")
        async with client.stream(PROMPT, PARAMS, request_id="mine") as stream:
            async for _ in stream:
                pass

    async def main() -> None:
        async with AsyncClient(url) as client, anyio.create_task_group() as group:
            group.start_soon(work, client)
            await anyio.to_thread.run_sync(slow.opened.wait, PATIENCE)
            await anyio.sleep(0.05)
            group.cancel_scope.cancel()

    anyio.run(main)
    assert slow.left.wait(PATIENCE)
    assert slow.aborted == ["mine"]


def test_a_generation_that_takes_too_long_is_aborted(slow, url):
    with (
        Client(url, timeout=0.2) as client,
        pytest.raises(UnreachableError, match="may have run"),
    ):
        client.generate(PROMPT, PARAMS, request_id="mine")
    assert slow.left.wait(PATIENCE)
    assert slow.aborted == ["mine"]


def test_a_port_where_nobody_listens_is_named(url):
    with Client("http://127.0.0.1:9", max_retries=0) as client, pytest.raises(UnreachableError):
        client.generate(PROMPT, PARAMS)
