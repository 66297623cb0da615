"""Our own form as a JSON object: the fields of a frame's header, and base64 of its payload.

`{"version", "layer_ids", "num_experts", "top_k", "num_hidden_layers", "num_rows", "sections", "start",
"prefix_hash", "codec", "provenance", "data"}`; fields with default values are left out, see
:class:`routebook.routes.frame.FrameHeader`, whose rules of evolution hold here too. It carries all
of a record: schema, absent rows, provenance and hashes.

Without JSON, the same record travels as binary frames in a body of type `FRAME_MEDIA_TYPE`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from routebook.errors import FormatError, SchemaMismatchError, SpanError
from routebook.routes.formats.base import RouteFormat
from routebook.routes.formats.base64_text import base64_pieces, decode_base64
from routebook.routes.formats.tokens_after import TokensAfter
from routebook.routes.frame import VERSION, FrameHeader, build_frame, describe_frame
from routebook.routes.record import RoutedExperts
from routebook.routes.schema import RouteSchema
from routebook.routes.token_hash import TokenIds, as_token_ids

FRAME_MEDIA_TYPE = "application/vnd.routebook"
"""Of a body that is binary frames of samples, one after the other: the content of a `.routes` file."""

_BLOCK_NBYTES = 512 * 1024


class FrameFormat(RouteFormat):
    """The object of `choices[i].routed_experts`. Drops nothing and refuses nothing."""

    name = "frame"

    def json_parts(self, record: RoutedExperts) -> list[bytes]:
        """See :class:`RouteFormat`; never refuses a record."""
        header, sections = describe_frame(record)
        fields = msgspec.json.encode(header)
        blocks = (
            section[at : at + _BLOCK_NBYTES].data
            for section in sections.values()
            for at in range(0, len(section), _BLOCK_NBYTES)
        )
        head = f'{{"version":{VERSION},'.encode() + fields[1:-1] + b',"data":"'
        return [head, *base64_pieces(blocks), b'"}']

    def decode(
        self,
        value: Any,
        schema: RouteSchema | None = None,
        token_ids: TokenIds | None = None,
        start: int | None = None,
        *,
        weight_version: int = 0,
    ) -> RoutedExperts:
        """See :class:`RouteFormat`. Schema, tokens and start are only checked, and may be left out.

        The weight version is the value's own, row by row; the one given is not looked at.

        Raises:
            FormatError: not an object of this form, or one that contradicts itself.
            SchemaMismatchError: another schema than the one given.
            SpanError: other positions than start and tokens ask for.
            TokenMismatchError: rows of other tokens.
        """
        record = _record_of(value, schema)
        _check_span(record, start, None if token_ids is None else len(as_token_ids(token_ids)))
        if token_ids is not None:
            record.check_tokens(token_ids)
        return record

    def decode_after(
        self, value: Any, schema: RouteSchema | None, tokens: TokensAfter, weight_version: int
    ) -> RoutedExperts:
        """See :class:`RouteFormat` and :meth:`decode`."""
        record = _record_of(value, schema)
        _check_span(record, tokens.start, tokens.num_tokens)
        tokens.check(record.token_hash_T, record.prefix_hash)
        return record


def _record_of(value: Any, schema: RouteSchema | None) -> RoutedExperts:
    if not isinstance(value, dict):
        raise FormatError(f"the rows must be an object, not {type(value).__name__}")
    version = value.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise FormatError(
            f"the frame has version {version!r}, and this routebook reads versions up to {VERSION}; "
            "install a newer one"
        )
    try:
        header = msgspec.convert(value, FrameHeader)
    except msgspec.ValidationError as error:
        raise FormatError(f"the frame's fields cannot be read: {error}") from error
    payload = np.frombuffer(decode_base64(value.get("data")), np.uint8)
    record = build_frame(header, payload)
    if not isinstance(record, RoutedExperts):
        raise FormatError("the frame holds a sample with its tokens, where bare rows must be")
    if schema is not None and record.schema != schema:
        raise SchemaMismatchError(f"the rows are of {record.schema}, not of {schema}")
    return record


def _check_span(record: RoutedExperts, start: int | None, num_tokens: int | None) -> None:
    if start is not None and record.start != start:
        raise SpanError(f"the rows begin at position {record.start}, not at start={start}")
    if num_tokens is not None and record.stop != num_tokens - 1:
        raise SpanError(
            f"the rows end at position {record.stop}, but those of {num_tokens} tokens end at "
            f"{num_tokens - 1}; pass all tokens known so far"
        )
