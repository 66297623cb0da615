"""A server over sockets for all tests, and an engine of the same model beside it to compare with."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import huggingface_hub.constants
import pytest
import uvicorn
import uvloop

from routebook import LLM
from routebook.engine.config import EngineConfig
from routebook.engine.engine import Engine
from routebook.server.app import make_app
from routebook.server.config import ServerConfig
from routebook.server.connection import stalling_protocol
from routebook.server.engine_client import EngineClient
from routebook.server.serving import Serving

# Bitwise the same however requests are batched, so that answers can be compared with another engine's.
OPTIONS = {"dtype": "float32", "reference": True, "max_model_len": 256}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PROMPT = "12+34=46\n50+27=77\n8+5=13\n17+25="


class RunningServer:
    """A server in a thread of this process."""

    def __init__(self, config: ServerConfig, api_key: str | None, options: dict[str, Any]) -> None:
        self._config = config
        self._api_key = api_key
        self._make_engine = partial(
            Engine, "tiny", EngineConfig.from_options(**(OPTIONS | options))
        )
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()))

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(60)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def settle(self) -> None:
        """Wait until nothing is open, and recount what is held."""

        async def idle() -> None:
            while self.client.num_open or self.serving._jobs:
                await asyncio.sleep(0.005)
            await self.client.check_integrity()

        self.run(asyncio.wait_for(idle(), 30))

    def app_layers(self) -> Iterator[Any]:
        """The application and what lies around it, from outside in."""
        layer = self._app.middleware_stack
        while layer is not None:
            yield layer
            layer = getattr(layer, "_app", None) or getattr(layer, "app", None)

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.client = await EngineClient.start(
            self._make_engine, max_queued=self._config.max_queued
        )
        self.serving = Serving(self.client, self._config, CHAT_TEMPLATE)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._app = make_app(self.serving, self._api_key)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                http=stalling_protocol(self._config.stall_timeout),
                lifespan="off",
                log_level="warning",
            )
        )
        self._server.install_signal_handlers = lambda: None
        self._loop.call_soon(self._ready.set)
        try:
            await self._server.serve(sockets=[listener])
        finally:
            await self.serving.aclose()


@contextmanager
def running(
    api_key: str | None = None, engine: dict[str, Any] | None = None, **options: Any
) -> Iterator[RunningServer]:
    """A server of its own, for tests that need other options."""
    server = RunningServer(ServerConfig(**options), api_key, engine or {})
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session", autouse=True)
def no_hub() -> Iterator[None]:
    """A name that is no folder is sought on the hub; here that ends at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RunningServer]:
    with running() as server:
        yield server


@pytest.fixture
def server(shared_server) -> Iterator[RunningServer]:
    """The server that all tests share; whatever a test does, nothing may be left of it."""
    yield shared_server
    shared_server.settle()


@pytest.fixture
def http(server) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The same model, without a server."""
    return LLM("tiny", **OPTIONS)
