"""Whoever waits for an engine learns of its end, whatever ended it; and what it holds can be asked for."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from routebook.engine.config import EngineConfig
from routebook.engine.engine import Engine
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import WorkerError
from routebook.server.engine_client import EngineClient
from routebook.server.engine_thread import Prompt
from tests.server.conftest import OPTIONS, RunningServer


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_our_own_in_every_step_leaves_nobody_waiting() -> None:
    async def run() -> None:
        config = EngineConfig.from_options(**OPTIONS, executor="inline")
        client = await EngineClient.start(partial(Engine, "tiny", config))

        params = SamplingParams(max_tokens=3)
        prompt = Prompt(name="one", token_ids=[5, 6, 7], params=params, text=None)

        def broken(*args: Any) -> Any:
            raise ZeroDivisionError("a fault of our own")

        client.engine.step = broken  # type: ignore[method-assign]
        with pytest.raises(WorkerError, match="has ended"):
            await client.generate(prompt)
        await asyncio.to_thread(client._thread.join)
        assert not client.is_alive

    asyncio.run(asyncio.wait_for(run(), 30))


def test_integrity_over_http(server: RunningServer) -> None:
    with server.http() as http:
        assert http.post("/check_integrity").json() == {"status": "ok"}
        metrics = http.get("/metrics").text
        assert "routebook_completions_held 0.0" in metrics
