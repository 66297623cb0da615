"""`routebook serve MODEL`: answer requests over HTTP."""

from __future__ import annotations

import argparse
from typing import Any

from routebook.cli.extras import engine_module, extra_module
from routebook.cli.options import add_options, take_options
from routebook.cli.quiet import quiet_loading
from routebook.engine.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
)
from routebook.server.config import ServerConfig

_CONFIGS = (ModelConfig, CacheConfig, SchedulerConfig, ExecutorConfig)
_DESCRIPTION = """Serve a mixture-of-experts model over HTTP, with the endpoints of vLLM, OpenAI and SGLang that
trainers call. The model runs in a process of its own unless --executor says otherwise, and two steps are under way
unless --max-steps-in-flight does."""


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="answer requests over HTTP",
        usage="%(prog)s MODEL [--host HOST] [--port N] [--api-key TEXT] [options]",
        description=_DESCRIPTION,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub id, or `tiny`")
    for config in (ServerConfig, *_CONFIGS):
        add_options(parser, config)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    config = ServerConfig(**take_options(arguments, ServerConfig))
    # The model's own threads would take turns with the event loop in one interpreter. With a second step under way the
    # worker goes on while this process hands out the first one's results, so that what one client asks for, rows to
    # encode say, is not in the way of the others.
    options: dict[str, Any] = {"executor": "process", "max_steps_in_flight": 2}
    for kind in _CONFIGS:
        options |= take_options(arguments, kind)
    engine_config = EngineConfig.from_options(**options)
    engine_module("engine")
    quiet_loading(arguments.model)
    extra_module("server.run", "server").serve(
        arguments.model, engine_config, config, ready=_say_ready
    )
    return 0


def _say_ready(address: str) -> None:
    print(f"routebook serves at {address}", flush=True)
