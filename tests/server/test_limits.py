"""What the server does not take on, and clients that go away or do not read."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress

import pytest

from routebook.engine.sampling_params import SamplingParams
from routebook.errors import ConfigError
from routebook.server.config import ServerConfig
from routebook.server.engine_thread import Prompt
from tests.server.conftest import running
from tests.server.events import join_choice, read_events
from tests.server.test_control import in_background, wait_until

PATH = "/inference/v1/generate"
LONG = {"max_tokens": 250, "ignore_eos": True}
BODY = {"token_ids": [5, 6, 7], "sampling_params": LONG, "return_routed_experts": True}


@pytest.fixture(scope="module")
def small():
    """A server that takes on little, and asks for a key."""
    with running(
        "secret key",
        {"max_num_seqs": 1},
        max_queued=1,
        max_open_requests=3,
        max_request_bytes=5000,
    ) as server:
        yield server
        server.settle()


@pytest.fixture
def http(small):
    with small.http(headers={"authorization": "Bearer secret key"}) as client:
        yield client
    small.settle()


@pytest.fixture
def http_of_server(server):
    with server.http() as client:
        yield client


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer secret"},
        {"authorization": "Bearer secret keyy"},
        {"authorization": "secret key"},
        {"authorization": "Basic secret key"},
        {"authorization": "Bearer sécret".encode()},
    ],
    ids=str,
)
def test_without_the_key_nobody_is_let_in(small, headers):
    with small.http(headers=headers) as client:
        for path in (PATH, "/v1/models", "/metrics", "/openapi.json", "/nowhere", "/pause"):
            answer = client.post(path, json={}) if path == PATH else client.get(path)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "Authorization" in answer.json()["error"]["message"]
        assert client.get("/health").status_code == 200


def test_with_the_key_everybody_is(http):
    assert http.get("/v1/models").status_code == 200
    assert http.get("/nowhere").status_code == 404


def test_completions_beyond_the_queue_are_refused(small, http):
    http.post("/pause").raise_for_status()
    first = in_background(http.post, PATH, json=BODY)
    wait_until(small, lambda: small.client.num_open == 1)
    second = {**BODY, "sampling_params": {"n": 2}}
    for stream in (False, True):
        answer = http.post(PATH, json={**second, "stream": stream})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert "1 completions are open, and 2 more" in answer.json()["error"]["message"]
    http.post("/resume").raise_for_status()
    assert first.result(60).status_code == 200
    assert http.post(PATH, json=second).status_code == 200


def test_requests_beyond_the_number_of_open_ones_are_refused(small, http):
    http.post("/pause").raise_for_status()
    clients = [small.http(headers=http.headers) for _ in range(2)]
    open_ones = [in_background(client.post, PATH, json=BODY) for client in clients]
    wait_until(small, lambda: small.client.num_open == 2)
    with socket.create_connection(small.url.removeprefix("http://").split(":")) as idle:
        # A request whose body never comes is open as well.
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        key = "authorization: Bearer secret key\r\ncontent-length: 10\r\n\r\n"
        idle.sendall((head + key).encode())
        limit = next(m for m in small.app_layers() if hasattr(m, "_num_open"))
        wait_until(small, lambda: limit._num_open == 3)
        answer = http.get("/v1/models")
        assert answer.status_code == 429
        assert "3 requests are open" in answer.json()["error"]["message"]
        assert http.get("/health").status_code == 200
    wait_until(small, lambda: limit._num_open == 2)
    http.post("/resume").raise_for_status()
    assert [one.result(60).status_code for one in open_ones] == [200, 200]
    for client in clients:
        client.close()


def test_large_bodies_are_refused_whether_their_length_is_told_or_not(http):
    large = json.dumps({"token_ids": [1] * 5000}).encode()
    kind = {"content-type": "application/json"}
    told = http.post(PATH, content=large, headers=kind)
    untold = http.post(PATH, content=iter([large[:3000], large[3000:]]), headers=kind)
    for answer in (told, untold):
        assert answer.status_code == 413
        assert "max_request_bytes=5000" in answer.json()["error"]["message"]
    small = json.dumps({"token_ids": [1] * 100, "sampling_params": {"max_tokens": 1}}).encode()
    assert http.post(PATH, content=iter([small]), headers=kind).status_code == 200


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 4000, b'{"a": NaN}', b'"\\ud800"', b""])
def test_what_is_no_json_is_refused(http, body):
    answer = http.post(PATH, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_what_it_had(server, http_of_server, stream, begun):
    def usage():
        return server.client.engine.scheduler.ledger.usage()

    def num_rows() -> int:
        return sum(r.num_computed_tokens for r in server.client.engine.scheduler.requests.values())

    address = server.url.removeprefix("http://").split(":")
    body = json.dumps({**BODY, "sampling_params": {**LONG, "n": 3}, "stream": stream}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    if not begun:
        http_of_server.post("/pause").raise_for_status()
    with socket.create_connection(address) as client:
        client.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        if stream:
            client.recv(1000)
        wait_until(server, lambda: usage().requests == 3)
        if begun:
            wait_until(server, lambda: num_rows() > 9)
            # From here on nothing ends by itself.
            http_of_server.post("/pause").raise_for_status()
    wait_until(server, lambda: server.client.num_open == 0)
    server.settle()
    assert (usage().requests, usage().request_chunks) == (0, 0)
    assert server.client.engine.scheduler.requests == {}
    http_of_server.post("/resume").raise_for_status()


def test_a_client_that_reads_nothing_is_cut_off():
    with running(stall_timeout=0.2, engine={"reference": False}) as server:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, port = server.url.removeprefix("http://").split(":")
            client.connect((host, int(port)))
            # Eight megabytes: more than the buffers of both ends hold.
            body = {**BODY, "routed_experts_format": "sglang", "token_ids": [5] * 255}
            body["sampling_params"] = {"n": 256, "max_tokens": 1}
            text = json.dumps(body).encode()
            head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            client.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(text) + text)
            wait_until(server, lambda: server.client.num_open == 256)
            wait_until(server, lambda: server.client.num_open == 0)
            wait_until(server, lambda: not server._server.server_state.connections)
            received = 0
            client.settimeout(30)
            with suppress(ConnectionResetError):
                while piece := client.recv(1 << 20):
                    received += len(piece)
            assert received < 256 * 255 * 6 * 4 * 4
        server.settle()


def test_a_slow_reader_gets_fewer_events_and_every_row(server, llm):
    """Nothing piles up for a reader who takes his time: increments wait, unmade, where the rows lie anyway."""
    body = {**BODY, "stream": True, "sampling_params": {**LONG, "max_tokens": 100}}

    async def read_slowly() -> list[int]:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        prompt = Prompt(name="slow", token_ids=[5, 6, 7], params=params)
        stream = await server.client.open_stream(prompt, lambda news: news, in_pool=False)
        sizes, stop = [], 0
        async for increments in stream:
            (one,) = increments
            assert one.routed_experts.start == stop
            stop = one.routed_experts.stop
            sizes.append(len(one.token_ids))
            await asyncio.sleep(0.1)
        stream.close()
        assert stop == 102
        return sizes

    sizes = server.run(read_slowly())
    assert sum(sizes) == 100
    assert len(sizes) < 60
    with server.http() as http:
        tokens, record = join_choice(
            read_events(http.post(PATH, json=body)), 0, [5, 6, 7], llm.schema
        )
    assert (len(tokens), record.stop) == (100, 102)


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"port": 65536},
        {"api_key": ""},
        {"max_queued": -1},
        {"max_open_requests": 0},
        {"max_request_bytes": 0},
        {"max_request_bytes": 2**40},
        {"stall_timeout": 0.0},
        {"stall_timeout": float("nan")},
        {"encoder_threads": 0},
    ],
    ids=str,
)
def test_options_that_cannot_work_are_named(options):
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**options)
