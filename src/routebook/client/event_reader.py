"""The answer of a stream, from bytes to deltas to the whole."""

from __future__ import annotations

from collections.abc import Iterator

from routebook.client.assembly import Assembly, Request
from routebook.client.event_stream import EventDecoder
from routebook.client.outputs import Generation, GenerationChunk
from routebook.client.wire import WireAnswer, parse
from routebook.errors import UnreachableError

_END = b"[DONE]"


class EventReader:
    """Reads the events of one request.

    Args:
        request: what was asked for.
    """

    def __init__(self, request: Request) -> None:
        self._assembly = Assembly(request)
        self._decoder = EventDecoder()
        self.is_done = False
        """Whether the stream said that it has ended."""

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids that the request goes by, the client's own and the server's."""
        ids = dict.fromkeys((self._assembly.request.request_id, self._assembly.request_id))
        return tuple(ids)

    def feed(self, piece: bytes) -> Iterator[GenerationChunk]:
        """The deltas that a piece of the stream completes; raises as :meth:`Assembly.add`."""
        for event in self._decoder.feed(piece):
            if event == _END:
                self.is_done = True
            else:
                yield self._assembly.add(parse(event, WireAnswer))

    def check_done(self) -> None:
        """Check at the end of the bytes that it is the end of the stream.

        Raises:
            UnreachableError: it broke off.
        """
        if not self.is_done:
            raise UnreachableError("the stream broke off before its end")

    def result(self) -> Generation:
        """The generation, once the stream has ended; raises as :meth:`Assembly.result`."""
        return self._assembly.result()
