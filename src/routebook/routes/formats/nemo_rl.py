"""NeMo-RL's form: text `nrlre1:<dtype>:<S>x<L>x<K>:<base64>`, one row for each of `S` tokens, -1 where there is none.

The dtype is signed and as small as the number of experts allows: int8, int16 or int32. `L` counts
MoE layers; arrays over all hidden layers, dense ones as zeros, are read too. Rows before the start
and absent ones are -1 throughout, and so is the last row, whose token was not an input yet; a
reader lets the model route such rows itself. Other writers put a placeholder into the last row, so
reading ignores it.

Since a value spans the whole sequence, it cannot be an increment of a stream.

Legend of shape suffixes: S = tokens, T = rows, L = MoE layers, K = top-k.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from routebook.errors import FormatError
from routebook.routes.formats.base import RouteFormat
from routebook.routes.formats.base64_text import base64_pieces, decode_base64
from routebook.routes.formats.hidden_layers import Ids, hidden_shape, take_moe_layers
from routebook.routes.formats.raw_ids import check_shape, read_ids, record_of_ids
from routebook.routes.formats.tokens_after import TokensAfter
from routebook.routes.record import Mask, RoutedExperts
from routebook.routes.schema import RouteSchema

_ENVELOPE = re.compile(r"nrlre1:(int8|int16|int32):(\d{1,12})x(\d{1,12})x(\d{1,12}):")
_MISSING = -1
_BLOCK_NBYTES = 512 * 1024


class NeMoRLFormat(RouteFormat):
    """The text of `routed_experts`. Keeps which rows are absent; drops start, provenance and hashes."""

    name = "nemo_rl"
    streams = False

    def json_parts(self, record: RoutedExperts) -> list[bytes]:
        """See :class:`RouteFormat`; never refuses a record."""
        schema = record.schema
        dtype = _dtype_of(schema)
        shape = "x".join(str(size) for size in schema.shape(record.stop + 1))
        pieces = base64_pieces(_padded_blocks(record, dtype))
        return [f'"nrlre1:{dtype.name}:{shape}:'.encode(), *pieces, b'"']

    def decode_after(
        self, value: Any, schema: RouteSchema, tokens: TokensAfter, weight_version: int
    ) -> RoutedExperts:
        """See :class:`RouteFormat`; rows that are -1 become absent ones.

        Raises:
            FormatError: also for rows before `start`, a row that is -1 in part, ids in a dense
                layer, or a row that is all zeros.
        """
        start = tokens.start
        ids_SLK = _read_envelope(value, schema, tokens.num_tokens)[:-1]
        valid_S = _valid_rows(ids_SLK)
        if valid_S[:start].any():
            raise FormatError(
                f"there is a row at position {int(np.flatnonzero(valid_S)[0])}, before start={start}; "
                "read from there on and slice the record"
            )
        ids_TLK, valid_T = ids_SLK[start:], valid_S[start:]
        if not valid_T.all():
            ids_TLK = _filled(ids_TLK, valid_T, schema)
        if ids_TLK.shape[1] != schema.num_layers:
            ids_TLK = take_moe_layers(ids_TLK, schema)
        return record_of_ids(ids_TLK, schema, tokens, weight_version, valid_T)


def _dtype_of(schema: RouteSchema) -> np.dtype[Any]:
    greatest = schema.num_experts - 1
    return np.dtype("int8" if greatest < 2**7 else "int16" if greatest < 2**15 else "int32")


def _padded_blocks(record: RoutedExperts, dtype: np.dtype[Any]) -> Iterator[memoryview]:
    """The bytes of `[S, L, K]`, some rows at a time; a block is valid until the next."""
    schema, num_tokens = record.schema, record.stop + 1
    row_nbytes = schema.num_layers * schema.top_k * dtype.itemsize
    num_rows = min(num_tokens, max(1, _BLOCK_NBYTES // row_nbytes))
    block = np.empty(schema.shape(num_rows), dtype.newbyteorder("<"))
    for at in range(0, num_tokens, num_rows):
        a, b = max(at, record.start), min(at + num_rows, record.stop)
        if b - a < num_rows:
            block[:] = _MISSING
        if a < b:
            rows = slice(a - record.start, b - record.start)
            block[a - at : b - at] = record.ids_TLK[rows]
            block[a - at : b - at][~record.valid_T[rows]] = _MISSING
        yield block[: num_tokens - at].reshape(-1).view(np.uint8).data


def _read_envelope(value: Any, schema: RouteSchema, num_tokens: int) -> Ids:
    """Ids `[S, L, K]` of the text's own dtype; L counts MoE layers or all hidden layers."""
    if not isinstance(value, str):
        raise FormatError(f"the rows must be text, not {type(value).__name__}")
    match = _ENVELOPE.match(value)
    if match is None:
        raise FormatError(f"{value[:40]!r} does not begin with nrlre1:<dtype>:<S>x<L>x<K>:")
    found = tuple(int(size) for size in match.groups()[1:])
    shape = schema.shape(num_tokens)
    if found[1] == schema.num_hidden_layers:
        shape = hidden_shape(schema, num_tokens)
    check_shape(found, shape)
    return read_ids(decode_base64(value[match.end() :]), np.dtype(match[1]), shape)


def _valid_rows(ids_SLK: Ids) -> Mask:
    """Which rows are there, bool `[S]`.

    Raises:
        FormatError: a row that is missing in part.
    """
    valid_S = np.ones(len(ids_SLK), np.bool_)
    if ids_SLK.min(initial=0) >= 0:
        return valid_S
    missing_SLK = ids_SLK == _MISSING
    valid_S = ~np.asarray(missing_SLK.all(axis=(1, 2)))
    partly_S = missing_SLK.any(axis=(1, 2)) & valid_S
    if partly_S.any():
        position = int(np.flatnonzero(partly_S)[0])
        raise FormatError(f"the row at position {position} is -1 in some places and not in others")
    return valid_S


def _filled(ids_TLK: Ids, valid_T: Mask, schema: RouteSchema) -> Ids:
    """The same with absent rows such that no check of a row minds them; the mask stays the truth."""
    has_dense = ids_TLK.shape[1] != schema.num_layers
    layers = np.array(schema.layer_ids) if has_dense else np.arange(schema.num_layers)
    ids_TLK = ids_TLK.copy()
    ids_TLK[~valid_T] = 0
    ids_TLK[np.ix_(~valid_T, layers)] = np.arange(schema.top_k)
    return ids_TLK
