"""`routebook serve`: its flags arrive, its mistakes are told, and a signal ends it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from dataclasses import fields

import httpx
import pytest

from routebook.engine.config import EngineConfig
from routebook.server import run as run_module
from routebook.server.config import API_KEY_VARIABLE, ServerConfig
from tests.cli.programs import LISTENING, RUN

SERVER = {
    "host": ("localhost", "localhost"),
    "port": ("81", 81),
    "api_key": ("k", "k"),
    "served_model_name": ("m", "m"),
    "chat_template": ("t.jinja", "t.jinja"),
    "return_routed_experts": (None, True),
    "max_queued": ("7", 7),
    "max_open_requests": ("8", 8),
    "max_request_bytes": ("9", 9),
    "stall_timeout": ("0.5", 0.5),
    "encoder_threads": ("3", 3),
}


@pytest.fixture
def served(monkeypatch):
    """What the server was asked to serve, instead of serving it."""
    asked = []
    monkeypatch.setattr(run_module, "serve", lambda *args, ready: asked.append(args))
    return asked


def test_every_field_of_the_server_is_tested():
    assert set(SERVER) == {field.name for field in fields(ServerConfig)}


@pytest.mark.parametrize("name", SERVER)
def test_a_server_flag_reaches_the_server(run, served, name):
    text, value = SERVER[name]
    flag = "--" + name.replace("_", "-")
    assert run("serve", "tiny", flag, *([] if text is None else [text])).status == 0
    process = EngineConfig.from_options(executor="process", max_steps_in_flight=2)
    assert served == [("tiny", process, ServerConfig(**{name: value}))]
    assert value != getattr(ServerConfig(), name)


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {"executor": "process", "max_steps_in_flight": 2}),
        (
            ["--executor", "inline", "--max-steps-in-flight", "1", "--block-size", "8"],
            {"executor": "inline", "block_size": 8},
        ),
    ],
)
def test_engine_flags_reach_the_engine(run, served, flags, options):
    assert run("serve", "tiny", *flags).status == 0
    assert served == [("tiny", EngineConfig.from_options(**options), ServerConfig())]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--port", "x"], "--port='x' is not a whole number"),
        (["--port", "70000"], "port=70000"),
        (["--chat-template", "/nowhere"], "cannot read the chat template /nowhere"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:8000"),
    ],
)
def test_mistakes_are_told_in_one_line(run, flags, part):
    done = run("serve", "tiny", *flags)
    assert done.status == 2
    assert part in done.error


def test_a_port_that_is_taken_is_told(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "tiny", "--port", str(port))
    assert done.status == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.error


def test_a_model_that_is_not_there_is_told(run):
    done = run("serve", "no-such-model", "--port", "0", "--executor", "inline")
    assert done.status == 2
    assert "no-such-model" in done.error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal_ends_it(number, monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "from the environment")
    command = [sys.executable, "-c", LISTENING + RUN, "serve", "tiny", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            url = process.stdout.readline().decode().split()[-1]
            assert httpx.get(f"{url}/v1/models").status_code == 401
            headers = {"authorization": "Bearer from the environment"}
            body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "ignore_eos": True}}
            answer = httpx.post(
                f"{url}/inference/v1/generate", json=body, headers=headers, timeout=60
            )
            assert len(answer.json()["choices"][0]["token_ids"]) == 3
            process.send_signal(number)
            assert process.wait(30) == 128 + number
        finally:
            process.kill()
        assert b"Traceback" not in process.stderr.read()
