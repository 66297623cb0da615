"""The ASGI application."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from routebook.errors import RoutebookError
from routebook.server.endpoints import chat, completions, control, generate, models, sglang
from routebook.server.http_errors import HTTPError, error_body, status_of
from routebook.server.middleware import ApiKeyMiddleware, LimitMiddleware, error_response
from routebook.server.responses import JSONBytes
from routebook.server.serving import Serving

_DESCRIPTION = "Completions of a mixture-of-experts model, with the experts that every token used."
_MOST_ERRORS = 3


def make_app(serving: Serving, api_key: str | None = None) -> FastAPI:
    """The application over what it serves; whoever makes it closes `serving`.

    Args:
        serving: engine, tokenizer and options.
        api_key: key that clients must send.
    """
    config = serving.config
    app = FastAPI(
        title="Routebook",
        version=version("routebook"),
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
    )
    app.state.serving = serving
    for module in (generate, completions, chat, sglang, models, control):
        app.include_router(module.router)
    app.add_exception_handler(RoutebookError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    if api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=api_key)
    app.add_middleware(LimitMiddleware, max_open=config.max_open_requests, metrics=serving.metrics)
    return app


def _on_error(request: Request, error: Exception) -> Response:
    """What the engine or an endpoint refuses, in its own words."""
    assert isinstance(error, RoutebookError)
    if isinstance(error, HTTPError):
        return error_response(error)
    return _error(status_of(error), str(error))


def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the framework refuses: unknown paths and methods, bodies that are too large or no JSON."""
    assert isinstance(error, HTTPException)
    return _error(error.status_code, str(error.detail), headers=dict(error.headers or {}))


def _on_invalid(request: Request, error: Exception) -> Response:
    """A body that does not have the form it should have."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    lines = [f"{_place(one['loc'])}: {one['msg']}" for one in found[:_MOST_ERRORS]]
    return _error(400, "; ".join(lines), _place(found[0]["loc"]))


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location if part != "body") or "body"


def _error(
    status: int, message: str, param: str | None = None, headers: dict[str, Any] | None = None
) -> Response:
    return JSONBytes(msgspec.json.encode(error_body(status, message, param)), status, headers)
