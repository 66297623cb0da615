"""vLLM's form: base64 of an `.npy` file, `[rows, num_hidden_layers, top_k]` of uint8 or uint16.

It lists every hidden layer, dense ones as zeros, and has neither a mask nor the position of its
first row nor the weights' version; the tokens and the start must come from the request. One sequence
of `N` tokens has `N - 1 - start` rows, since the last token was never an input.

Legend of shape suffixes: T = rows, H = hidden layers, L = MoE layers, K = top-k.
"""

from __future__ import annotations

import io
import re
import struct
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from routebook.errors import FormatError, TruncatedError
from routebook.routes.formats.base import RouteFormat
from routebook.routes.formats.base64_text import base64_pieces, decode_base64
from routebook.routes.formats.hidden_layers import Ids, hidden_layer_blocks, hidden_shape
from routebook.routes.formats.raw_ids import (
    check_shape,
    read_ids,
    record_of_hidden_layers,
)
from routebook.routes.formats.tokens_after import TokensAfter
from routebook.routes.record import RoutedExperts
from routebook.routes.schema import RouteSchema
from routebook.routes.token_hash import TokenIds

_MAGIC = b"\x93NUMPY"
_HEADER = re.compile(
    rb"\{'descr': '([|<>=]?u[1248])', 'fortran_order': (True|False), "
    rb"'shape': \((\d{1,12}), (\d{1,12}), (\d{1,12})\), \} *\n"
)


class VLLMFormat(RouteFormat):
    """The text of `choices[i].routed_experts`. Drops provenance and hashes; absent rows are refused."""

    name = "vllm"

    def json_parts(self, record: RoutedExperts) -> list[bytes]:
        """See :class:`RouteFormat`."""
        schema = record.schema
        ids_TLK = record.complete_ids(
            "vLLM's form has no mask for them, so slice to valid rows or choose another format"
        )
        dtype = schema.dtype.newbyteorder("<")
        header = _header_bytes(dtype, hidden_shape(schema, record.num_rows))
        blocks = hidden_layer_blocks(ids_TLK, schema, dtype)
        return [b'"', *base64_pieces(chain([header], blocks)), b'"']

    def decode_after(
        self, value: Any, schema: RouteSchema, tokens: TokensAfter, weight_version: int
    ) -> RoutedExperts:
        """See :class:`RouteFormat`.

        Raises:
            FormatError: also for ids in a dense layer, or a row that is all zeros, as rows are that
                were never computed.
        """
        shape = hidden_shape(schema, tokens.num_rows)
        ids_THK = _read_npy(decode_base64(value), schema.dtype, shape)
        return record_of_hidden_layers(ids_THK, schema, tokens, weight_version)


def to_vllm(record: RoutedExperts) -> str:
    """Write a record as the text of `choices[i].routed_experts`.

    Raises:
        RecordError: a row is absent; this form cannot say so.
    """
    text: str = VLLMFormat().encode(record)
    return text


def from_vllm(
    text: str,
    schema: RouteSchema,
    token_ids: TokenIds,
    start: int = 0,
    *,
    weight_version: int = 0,
) -> RoutedExperts:
    """Read the text of `choices[i].routed_experts`.

    Args:
        text: base64 of an `.npy` file.
        schema: which of the hidden layers are MoE layers; the rest must be zero.
        token_ids: all tokens of the sequence, prompt and sampled.
        start: position of the first row: `routed_experts_prompt_start` of the request.
        weight_version: version of the weights that computed the rows; the text does not tell.

    Returns:
        A record of `len(token_ids) - 1 - start` valid rows, their origin `TRANSFERRED`.

    Raises:
        FormatError: not base64 of an `.npy` file, another dtype or shape than schema and tokens ask
            for, ids in a dense layer, or a row that is all zeros, as rows are that were never
            computed.
        RecordError: an id that no expert has.
    """
    return VLLMFormat().decode(text, schema, token_ids, start, weight_version=weight_version)


@lru_cache(maxsize=256)
def _header_bytes(dtype: np.dtype[Any], shape: tuple[int, int, int]) -> bytes:
    """What `np.save` writes before the array."""
    file = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    np.lib.format.write_array_header_1_0(file, {**described, "shape": shape})
    return file.getvalue()


def _read_npy(data: bytes, dtype: np.dtype[np.unsignedinteger], shape: tuple[int, int, int]) -> Ids:
    """Read an `.npy` file that must hold exactly this dtype and shape, as a view.

    numpy's own reader evaluates the header as Python text and allocates what it claims before it
    looks at the data, so the header is matched here instead, in the one form that numpy writes.
    """
    header, data_at = _npy_header(data)
    match = _HEADER.fullmatch(header)
    if match is None:
        raise FormatError(f"the .npy header {header[:80]!r} is not one of a 3-axis array of ids")
    found = np.dtype(match[1].decode())
    if found != dtype:
        raise FormatError(
            f"the array is {found}, but ids of this model are {dtype}; check the schema"
        )
    if match[2] == b"True":
        raise FormatError("the array lies in Fortran order; save it in C order")
    check_shape(tuple(int(size) for size in match.groups()[2:]), shape)
    return read_ids(memoryview(data)[data_at:], dtype, shape)


def _npy_header(data: bytes) -> tuple[bytes, int]:
    """The text that describes the array, and where the array begins."""
    if data[:6] != _MAGIC[: len(data)]:
        raise FormatError(f"this is no .npy file: it begins with {data[:6].hex(' ')}")
    if len(data) < 12:
        raise TruncatedError(f"an .npy file of {len(data)} bytes ends before its header")
    if data[6] not in (1, 2, 3) or data[7] != 0:
        raise FormatError(f"an .npy file of version {data[6]}.{data[7]} is not known; save it anew")
    header_at = 10 if data[6] == 1 else 12
    (nbytes,) = struct.unpack_from("<H" if data[6] == 1 else "<I", data, 8)
    if len(data) < header_at + nbytes:
        raise TruncatedError(f"an .npy file of {len(data)} bytes ends within its header")
    return data[header_at : header_at + nbytes], header_at + nbytes
