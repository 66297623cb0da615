"""Answers that are sent piece by piece, never faster than they are read.

A piece is handed to the server only when the one before has left for the operating system's buffers, so what waits for
a slow reader is the answer itself and a little more. Who reads nothing at all is cut off, see
:mod:`routebook.server.connection`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from routebook.server.disconnect import wait_for_disconnect

_PIECE_NBYTES = 128 * 1024


class PiecesResponse(Response):
    """A body that is there already, in pieces.

    Args:
        pieces: the body.
        media_type: its type.
    """

    def __init__(self, pieces: list[bytes], media_type: str) -> None:
        self._pieces = pieces
        super().__init__(
            media_type=media_type, headers={"content-length": str(sum(map(len, pieces)))}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the body."""
        await _send_start(self, send)
        for piece in _cut(self._pieces):
            await _send_body(send, piece)
        await _send_end(send)


class EventStream(Response):
    """Server-sent events.

    Args:
        events: the events, each bunch in pieces.
        close: called at the end, whatever ends it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[list[bytes], None],
        close: Callable[[], None],
    ) -> None:
        self._events = events
        self._close = close
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until there are no more, or the client goes away."""
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            self._close()
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await _send_start(self, send)
        async for pieces in self._events:
            for piece in _cut(pieces):
                await _send_body(send, piece)
        await _send_end(send)


def _cut(pieces: Iterable[bytes]) -> Iterator[bytes | memoryview]:
    """Small pieces together, large ones as views of their parts, so that no single write takes long."""
    small: list[bytes] = []
    nbytes = 0
    for piece in pieces:
        if small and nbytes + len(piece) > _PIECE_NBYTES:
            yield b"".join(small)
            small, nbytes = [], 0
        if len(piece) > _PIECE_NBYTES:
            view = memoryview(piece)
            yield from (view[at : at + _PIECE_NBYTES] for at in range(0, len(view), _PIECE_NBYTES))
            continue
        small.append(piece)
        nbytes += len(piece)
    if small:
        yield b"".join(small)


async def _send_start(response: Response, send: Send) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": response.raw_headers,
        }
    )


async def _send_body(send: Send, piece: bytes | memoryview) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})
    if len(piece) > _PIECE_NBYTES // 2:
        # A reader who is fast enough would have the whole answer written in one turn of the event loop.
        await asyncio.sleep(0)


async def _send_end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class JSONBytes(Response):
    """A small JSON value.

    Args:
        body: its text.
        status: the HTTP status.
        headers: further headers.
    """

    media_type = "application/json"

    def __init__(
        self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(body, status, headers)
