"""JSON texts in pieces, with large values spliced in as they were encoded."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec


class Spliced:
    """A value whose JSON text is there already, in pieces."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts


def encode_json(value: Any) -> list[bytes]:
    """The JSON text of a value that may hold :class:`Spliced` values anywhere; not one byte of those is copied."""
    spliced: list[Spliced] = []
    # Nobody can guess it, so nothing else in the text is taken for it.
    mark = secrets.token_hex(16)

    def note(other: Any) -> str:
        assert isinstance(other, Spliced), f"{other!r} is no JSON value"
        spliced.append(other)
        return mark

    text = msgspec.json.encode(value, enc_hook=note)
    if not spliced:
        return [text]
    first, *rest = text.split(b'"' + mark.encode() + b'"')
    pieces = [first]
    for value_there, following in zip(spliced, rest, strict=True):
        pieces += value_there.parts
        pieces.append(following)
    return pieces


def server_sent_event(value: Any) -> list[bytes]:
    """One event of a stream, in pieces."""
    return [b"data: ", *encode_json(value), b"\n\n"]


LAST_EVENT = [b"data: [DONE]\n\n"]
"""Ends a stream."""
