from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import anyio
import httpx
import pytest

from routebook import AsyncClient, Client, SamplingParams
from routebook.client import client as client_module
from routebook.client.retry import RetryPolicy
from routebook.errors import ConfigError, MissingExtraError, ServerError, UnreachableError
from tests.client.fake import FakeServer, error

URL = "http://fake"
PROMPT = [1, 2, 3]
PARAMS = SamplingParams(max_tokens=2)
NOT_STARTED = [
    httpx.ConnectError("refused"),
    httpx.ConnectTimeout("slow"),
    error(429, "full"),
    error(503, "asleep"),
]
MAY_HAVE_STARTED = [
    httpx.ReadTimeout("slow"),
    httpx.ReadError("reset"),
    httpx.WriteError("reset"),
    httpx.RemoteProtocolError("closed"),
]


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """Waits that the client asked for, none of which happens."""
    asked: list[float] = []
    monkeypatch.setattr(client_module.time, "sleep", asked.append)
    return asked


def generate(server: FakeServer, **options: object):
    with Client(URL, transport=server.transport, **options) as client:
        return client.generate(PROMPT, PARAMS)


def stream(server: FakeServer, **options: object):
    with (
        Client(URL, transport=server.transport, **options) as client,
        client.stream(PROMPT, PARAMS) as opened,
    ):
        return opened.result()


@pytest.mark.parametrize("call", [generate, stream])
@pytest.mark.parametrize("outcome", NOT_STARTED, ids=repr)
def test_what_was_not_started_is_sent_again(call, outcome, waits):
    server = FakeServer(outcome, outcome)
    assert len(call(server).choices[0].token_ids) == 2
    assert len(server.requests) == 3
    assert len(waits) == 2


@pytest.mark.parametrize("call", [generate, stream])
@pytest.mark.parametrize("outcome", MAY_HAVE_STARTED, ids=repr)
def test_what_may_have_started_is_not_sent_again_but_aborted(call, outcome, waits):
    server = FakeServer(outcome)
    with pytest.raises(UnreachableError, match="may have run, so it was not sent again"):
        call(server)
    assert [request.url.path for request in server.requests] == [
        "/inference/v1/generate",
        "/inference/v1/abort_requests",
    ]
    assert server.bodies[1]["request_ids"] == [server.bodies[0]["request_id"]]
    assert waits == []


@pytest.mark.parametrize("status", [401, 403, 500, 502, 504])
def test_other_answers_are_not_asked_for_again(status, waits):
    server = FakeServer(error(status, "no"))
    with pytest.raises(ServerError, match=f"answered {status}: no") as caught:
        generate(server)
    assert caught.value.status == status
    assert len(server.requests) == 1


def test_the_client_gives_up_after_max_retries(waits):
    server = FakeServer(*[error(503, "asleep")] * 9)
    with pytest.raises(ServerError, match=r"503: asleep \(tried 4 times\)") as caught:
        generate(server, max_retries=3)
    assert caught.value.status == 503
    assert len(waits) == 3


def test_a_server_that_is_not_there_is_named(waits):
    with pytest.raises(UnreachableError, match=r"http://fake cannot be reached: refused$"):
        generate(FakeServer(httpx.ConnectError("refused")), max_retries=0)


def test_the_server_says_how_long_to_wait(waits):
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
    server = FakeServer(
        error(429, "full", **{"retry-after": "7"}), error(503, "full", **{"retry-after": later})
    )
    generate(server)
    assert waits[0] == 7.0
    assert 15 < waits[1] <= 20


def test_a_wait_that_is_too_long_is_told_at_once(waits):
    server = FakeServer(error(429, "come back tomorrow", **{"retry-after": "86400"}))
    with pytest.raises(ServerError, match="come back tomorrow"):
        generate(server)
    assert waits == []


def test_waits_grow_up_to_a_limit_and_differ_from_client_to_client():
    policy = RetryPolicy(max_retries=99, max_wait=3.0)
    outcome = httpx.ConnectError("refused")
    longest = [max(policy.wait(n, outcome) or 0 for _ in range(200)) for n in (1, 2, 3, 40)]
    assert longest == sorted(longest)
    assert 2.5 < longest[-1] <= 3.0
    assert len({policy.wait(1, outcome) for _ in range(9)}) == 9


@pytest.mark.parametrize("text", ["", "soon", "-3", "1.5"])
def test_a_wait_that_is_no_number_and_no_date_counts_as_none(text):
    policy = RetryPolicy(max_retries=1, max_wait=3.0)
    wait = policy.wait(1, error(503, "x", **{"retry-after": text}))
    assert wait is not None
    assert wait <= 0.25


def test_the_async_client_waits_and_sends_again(monkeypatch):
    asked: list[float] = []

    async def sleep(seconds: float) -> None:
        asked.append(seconds)

    monkeypatch.setattr(anyio, "sleep", sleep)
    server = FakeServer(*NOT_STARTED)

    async def main() -> None:
        async with AsyncClient(URL, transport=server.transport) as client:
            assert len((await client.generate(PROMPT, PARAMS)).choices) == 1

    anyio.run(main)
    assert len(asked) == len(NOT_STARTED)


def test_an_error_page_that_is_no_json_is_quoted():
    server = FakeServer(httpx.Response(502, text="<html>Bad Gateway</html>"))
    with pytest.raises(ServerError, match="502: <html>Bad Gateway"):
        generate(server)


@pytest.mark.parametrize(
    ("url", "options", "word"),
    [
        ("localhost:8000", {}, "must begin with http://"),
        (URL, {"routed_experts_format": "npy"}, "npy.*vllm"),
        (URL, {"timeout": 0}, "timeout=0 must be a number above 0"),
        (URL, {"max_retries": -1}, "max_retries=-1"),
        (URL, {"max_retires": 3}, "max_retires is not an option.*max_retries"),
    ],
)
def test_options_that_cannot_work_are_refused(url, options, word):
    for kind in (Client, AsyncClient):
        with pytest.raises(ConfigError, match=word):
            kind(url, **options)


def test_without_httpx_the_extra_is_named(monkeypatch):
    import sys

    import routebook

    for name in [name for name in sys.modules if name.startswith("routebook.client")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'routebook\[client\]'"):
        _ = routebook.AsyncClient
