"""vLLM's own server, started with one command: rows over its endpoints, and requests that decline them.

Run as `python -m tests.hosts.vllm.server_run`; prints one line of JSON.
"""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np

from routebook.hosts.vllm.releases import installed_version
from routebook.models import bundled_model_path
from tests.hosts.vllm.oracle import Oracle, Tally

PROMPT = [11, 22, 33, 44, 55, 66, 77, 88, 99, 110] * 4


@contextmanager
def server(folder: str) -> Iterator[httpx.Client]:
    """A server on a free port, until the end of the block."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    options = (
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--port", str(port)),
        *("--block-size", "32", "--num-gpu-blocks-override", "32", "--max-num-seqs", "4"),
        *("--kv-cache-memory-bytes", str(2**26), "--host", "127.0.0.1"),
        *("--served-model-name", "tiny", "--additional-config", '{"other": 1}'),
    )
    if not installed_version().startswith("0.27."):
        options += ("--enable-scale-out",)
    command = [sys.executable, "-m", "routebook.hosts.vllm", "serve", folder, *options]
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with subprocess.Popen(command, env=environment, stdout=sys.stderr) as process:
        try:
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False
            ) as client:
                _wait(client, process)
                yield client
        finally:
            process.terminate()


def _wait(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, "the server ended"
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise TimeoutError("the server did not start")


def rows_of(text: str) -> np.ndarray:
    """An array from vLLM's field."""
    array: np.ndarray = np.load(io.BytesIO(base64.b64decode(text)))
    return array


def ask(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """Post a request; the answer's one choice."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def completion_tokens(choice: dict[str, Any]) -> list[int]:
    """Token ids of a choice that was asked for with `return_token_ids`."""
    tokens: list[int] = choice["token_ids"]
    return tokens


def main() -> dict[str, Any]:
    """Ask every endpoint that has the field."""
    folder = str(bundled_model_path("tiny"))
    tally = Tally(Oracle(folder))

    def compare(prompt: list[int], choice: dict[str, Any]) -> None:
        rows = rows_of(choice["routed_experts"])
        told = SimpleNamespace(token_ids=completion_tokens(choice), routed_experts=rows)
        tally.compare(prompt, told)

    with server(folder) as client:
        common = {"model": "tiny", "max_tokens": 20, "temperature": 0, "return_token_ids": True}
        whole = ask(client, "/v1/completions", prompt=PROMPT, **common)
        compare(PROMPT, whole)
        stop = whole["text"][12:15]
        stopped = ask(client, "/v1/completions", prompt=PROMPT, stop=[stop], **common)
        assert stopped["finish_reason"] == "stop"
        compare(PROMPT, stopped)
        declined = {"vllm_xargs": {"routed_experts": 0}}
        assert (
            ask(client, "/v1/completions", prompt=PROMPT, **common, **declined)["routed_experts"]
            is None
        )
        messages = [{"role": "user", "content": "Tell me a story"}]
        answer = client.post("/v1/chat/completions", json={"messages": messages, **common}).json()
        compare(answer["prompt_token_ids"], answer["choices"][0])
        params = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
        generated = ask(client, "/inference/v1/generate", token_ids=PROMPT, sampling_params=params)
        compare(PROMPT, generated)
        params["extra_args"] = {"routed_experts": False}
        generated = ask(client, "/inference/v1/generate", token_ids=PROMPT, sampling_params=params)
        assert generated["routed_experts"] is None
    return {"pairs": tally.pairs, "different": tally.different, "shifted": tally.shifted}


if __name__ == "__main__":
    print(json.dumps(main()), flush=True)
