"""Clients that go away while they are served."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

_CLIENT_CLOSED_REQUEST = 499


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has gone; its request must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Run `work`, and cancel it when the client goes away; then nobody reads the answer."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
