"""The client and the server, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import anyio
import numpy as np
import pytest

from routebook import AsyncClient, Client, SamplingParams
from routebook.routes.formats import FORMATS

KEY = "a key"
TEXT = "The quick brown fox"
SERVE = f"""
from routebook.engine.config import EngineConfig
from routebook.server.config import ServerConfig
from routebook.server.run import serve

serve(
    "tiny",
    EngineConfig.from_options(executor="thread"),
    ServerConfig(port=0, api_key={KEY!r}),
    ready=lambda address: print("READY", address, flush=True),
)
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        addresses = (line.split()[1] for line in process.stdout if line.startswith("READY"))
        yield next(addresses)
        process.terminate()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("start", [0, 2])
def test_whole_and_streamed_answers_have_the_same_rows_in_every_format(url, name, n, start):
    params = SamplingParams(
        n=n, max_tokens=6, seed=5, routed_experts_prompt_start=start, logprobs=1
    )
    with (
        Client(url, api_key=KEY) as client,
        Client(url, api_key=KEY, routed_experts_format=name) as other,
    ):
        expected = client.generate(TEXT, params)
        found = [other.generate(TEXT, params)]
        if FORMATS[name].streams:
            with other.stream(TEXT, params) as stream:
                found.append(stream.result())
    for generation in found:
        for one, two in zip(expected.choices, generation.choices, strict=True):
            assert (one.text, one.token_ids, one.logprobs) == (
                two.text,
                two.token_ids,
                two.logprobs,
            )
            assert (one.finish_reason, one.stop_reason) == (two.finish_reason, two.stop_reason)
            assert one.routed_experts is not None
            assert two.routed_experts is not None
            assert one.routed_experts.start == two.routed_experts.start == start
            assert np.array_equal(one.routed_experts.ids_TLK, two.routed_experts.ids_TLK)


def test_a_stop_token_and_a_stop_text_are_told_apart(url):
    with Client(url, api_key=KEY) as client:
        plain = client.generate(TEXT, SamplingParams(max_tokens=8, seed=5)).choices[0]
        token = plain.token_ids[3]
        for params in (
            SamplingParams(max_tokens=8, seed=5, stop_token_ids=(token,)),
            SamplingParams(max_tokens=8, seed=5, stop=((plain.text or "")[-3:],)),
        ):
            whole = client.generate(TEXT, params).choices[0]
            with client.stream(TEXT, params) as stream:
                streamed = stream.result().choices[0]
            assert whole.finish_reason == streamed.finish_reason == "stop"
            assert whole.stop_reason == streamed.stop_reason
            assert type(whole.stop_reason) is (int if params.stop_token_ids else str)


def test_many_streams_at_once_each_get_their_own_rows(url):
    async def one(client: AsyncClient, seed: int) -> None:
        params = SamplingParams(n=2, max_tokens=12, seed=seed)
        async with client.stream(TEXT, params) as stream:
            streamed = await stream.result()
        whole = await client.generate(TEXT, params)
        for choice, other in zip(streamed.choices, whole.choices, strict=True):
            assert choice.token_ids == other.token_ids
            assert choice.routed_experts is not None
            choice.routed_experts.check_tokens([*streamed.prompt_token_ids, *choice.token_ids])

    async def main() -> None:
        async with AsyncClient(url, api_key=KEY) as client, anyio.create_task_group() as group:
            for seed in range(12):
                group.start_soon(one, client, seed)

    anyio.run(main)
