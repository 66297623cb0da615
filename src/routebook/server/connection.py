"""One client's connection, under uvicorn."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class StallingProtocol(HttpToolsProtocol):
    """Cuts off a client that reads nothing for `stall_timeout` seconds while there is something to read.

    Closing such a connection in the usual way would wait, with all that is buffered, for the client to read it.
    """

    stall_timeout: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stalled: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """More is buffered than the client has taken."""
        super().pause_writing()
        self._stalled = self.loop.call_later(self.stall_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        self._stop_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or was cut off."""
        self._stop_timer()
        super().connection_lost(exc)

    def _stop_timer(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


def stalling_protocol(seconds: float) -> type[StallingProtocol]:
    """The protocol with this timeout."""
    return type("Protocol", (StallingProtocol,), {"stall_timeout": seconds})
