"""Server-sent events from bytes that come in pieces of any size."""

from __future__ import annotations

from collections.abc import Iterator

_DATA = b"data:"


class EventDecoder:
    """Splits a stream of bytes into the data of its events. Fields other than `data` are passed over."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._searched = 0
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of the events that this piece completes."""
        self._line += piece
        begin = 0
        while (end := self._line.find(b"\n", max(begin, self._searched))) >= 0:
            line = bytes(self._line[begin:end]).removesuffix(b"\r")
            begin = end + 1
            if line.startswith(_DATA):
                self._data.append(line[len(_DATA) :].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []
        del self._line[:begin]
        # A long line comes in many pieces; what was searched is not searched again.
        self._searched = len(self._line)
