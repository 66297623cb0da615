"""A server in this process."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvicorn
import uvloop

from routebook.engine.config import EngineConfig
from routebook.engine.engine import Engine
from routebook.errors import ConfigError
from routebook.server.app import make_app
from routebook.server.config import API_KEY_VARIABLE, ServerConfig
from routebook.server.connection import stalling_protocol
from routebook.server.engine_client import EngineClient
from routebook.server.serving import Serving

_SWITCH_S = 0.0005
"""How long the event loop waits for another thread that computes; Python's own value is ten times as long."""


def serve(
    model: str,
    engine_config: EngineConfig,
    config: ServerConfig,
    ready: Callable[[str], None] = print,
) -> None:
    """Serve a model until a signal ends it.

    Args:
        model: a folder, a hub id, or a bundled name.
        engine_config: options of the engine.
        config: options of the server.
        ready: told the server's address once it takes requests.

    Raises:
        ModelError, ConfigError: the engine does not start, or the address cannot be listened on.
    """
    sys.setswitchinterval(_SWITCH_S)
    listener = _listen(config)
    with listener:
        uvloop.run(_serve(partial(Engine, model, engine_config), config, listener, ready))


async def _serve(
    make_engine: Callable[[], Engine],
    config: ServerConfig,
    listener: socket.socket,
    ready: Callable[[str], None],
) -> None:
    template = read_chat_template(config)
    client = await EngineClient.start(
        make_engine, max_queued=config.max_queued, num_encoders=config.encoder_threads
    )
    serving = Serving(client, config, template)
    try:
        api_key = config.api_key or os.environ.get(API_KEY_VARIABLE) or None
        server = uvicorn.Server(
            uvicorn.Config(
                make_app(serving, api_key),
                http=stalling_protocol(config.stall_timeout),
                lifespan="off",
                log_level="warning",
                timeout_graceful_shutdown=5,
            )
        )
        # All that was loaded lives as long as the server; to look through it again and again halts every thread.
        gc.collect()
        gc.freeze()
        host, port = listener.getsockname()[:2]
        ready(f"http://{host}:{port}")
        await server.serve(sockets=[listener])
    finally:
        await serving.aclose()


def read_chat_template(config: ServerConfig) -> str | None:
    """The chat template that the options name.

    Raises:
        ConfigError: the file cannot be read.
    """
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the chat template {config.chat_template}: {error}"
        ) from error


def _listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error}; choose another host or port"
        ) from error
