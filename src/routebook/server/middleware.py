"""What every request passes on its way in."""

from __future__ import annotations

import hmac
from hashlib import sha256

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from routebook.server.http_errors import (
    HTTPError,
    QueueFullError,
    UnauthorizedError,
    error_body,
)
from routebook.server.metrics import Metrics
from routebook.server.responses import JSONBytes

_OPEN_PATHS = frozenset({"/health"})


class ApiKeyMiddleware:
    """Lets in who sends the key; the comparison takes as long for a wrong key as for the right one.

    Args:
        app: what comes behind.
        api_key: the key.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._digest = sha256(f"Bearer {api_key}".encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request."""
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = Headers(scope=scope).get("authorization", "").encode()
            if not hmac.compare_digest(sha256(given).digest(), self._digest):
                error = UnauthorizedError("send the server's key as `Authorization: Bearer KEY`")
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class LimitMiddleware:
    """Refuses requests beyond a number of open ones, and counts how requests were answered.

    Args:
        app: what comes behind.
        max_open: most requests at once.
        metrics: where answers are counted.
    """

    def __init__(self, app: ASGIApp, max_open: int, metrics: Metrics) -> None:
        self._app = app
        self._max_open = max_open
        self._metrics = metrics
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, if there is room."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = self._counting(scope, send)
        if self._num_open >= self._max_open and scope["path"] not in _OPEN_PATHS:
            error = QueueFullError(
                f"{self._num_open} requests are open, the most allowed; try again later"
            )
            await error_response(error)(scope, receive, send)
            return
        self._num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_open -= 1

    def _counting(self, scope: Scope, send: Send) -> Send:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                # A path that no endpoint has would be a label that the client chooses.
                route = scope.get("route")
                path = getattr(route, "path", "other")
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        return counting


def error_response(error: HTTPError) -> JSONBytes:
    """The answer to an error."""
    headers = {"retry-after": "1"} if isinstance(error, QueueFullError) else {}
    if isinstance(error, UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    body = error_body(error.status, str(error), error.param)
    return JSONBytes(msgspec.json.encode(body), error.status, headers)
