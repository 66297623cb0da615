"""vLLM's own OpenAI server, with rows in it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from runpy import run_module

from routebook.errors import ConfigError
from routebook.hosts.vllm.config import ALL, ASKED, HostConfig
from routebook.hosts.vllm.launch import check_platform, engine_args

_SERVER = "vllm.entrypoints.openai.api_server"


def server_arguments(argv: Sequence[str]) -> list[str]:
    """The arguments of vLLM's server for `serve MODEL ...`: the same, with ours in them.

    Raises:
        ConfigError: another worker or scheduler, or options that are not JSON.
    """
    parser = argparse.ArgumentParser(
        prog="python -m routebook.hosts.vllm serve",
        description="Starts vLLM's server with rows in it. All other options are those of `vllm serve`.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="as `vllm serve` takes it")
    parser.add_argument(
        "--routebook-rows",
        choices=(ALL, ASKED),
        default=ALL,
        help="which requests get rows: all that do not decline them, or those that asked",
    )
    for name in ("--worker-cls", "--scheduler-cls", "--additional-config"):
        parser.add_argument(name, help="as `vllm serve` takes it")
    known, rest = parser.parse_known_args(argv)
    if dotted := [a for a in rest if a.startswith("--additional-config.")]:
        raise ConfigError(f"{dotted[0]} is not taken; give --additional-config as one JSON text")
    given = {
        "worker_cls": known.worker_cls or "auto",
        "scheduler_cls": known.scheduler_cls,
        "additional_config": _read_json(known.additional_config),
    }
    ours = engine_args(HostConfig(rows=known.routebook_rows), given)
    return [
        *("--model", known.model, *rest),
        *("--worker-cls", ours["worker_cls"], "--scheduler-cls", ours["scheduler_cls"]),
        *("--additional-config", json.dumps(ours["additional_config"])),
    ]


def serve(argv: Sequence[str]) -> None:
    """Run the server until it is stopped.

    Args:
        argv: the model, then options.

    Raises:
        ConfigError: rows cannot be had with these options.
    """
    arguments = server_arguments(argv)
    from vllm.platforms import current_platform

    check_platform(current_platform.is_cpu())
    sys.argv = [_SERVER, *arguments]
    run_module(_SERVER, run_name="__main__", alter_sys=True)


def _read_json(text: str | None) -> dict[str, object]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--additional-config {text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--additional-config {text!r} is not a JSON object")
    return value
