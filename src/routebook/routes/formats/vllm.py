"""vLLM's form: base64 of an `.npy` file, `[rows, num_hidden_layers, top_k]` of uint8 or uint16.

It lists every hidden layer, dense ones as zeros, and has neither a mask nor the position of its
first row nor the weights' version; the tokens and the start must come from the request. One sequence
of `N` tokens has `N - 1 - start` rows, since the last token was never an input.

Legend of shape suffixes: T = rows, H = hidden layers, L = MoE layers, K = top-k.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import struct

import numpy as np

from routebook.errors import DamagedError, FormatError, TruncatedError
from routebook.routes.provenance import Origin
from routebook.routes.record import RoutedExperts, RouteIds
from routebook.routes.schema import RouteSchema
from routebook.routes.token_hash import TokenIds, as_token_ids

_MAGIC = b"\x93NUMPY"
_HEADER = re.compile(
    rb"\{'descr': '([|<>=]?u[1248])', 'fortran_order': (True|False), "
    rb"'shape': \((\d{1,12}), (\d{1,12}), (\d{1,12})\), \} *\n"
)


def to_vllm(record: RoutedExperts) -> str:
    """Write a record as the text of `choices[i].routed_experts`.

    Raises:
        RecordError: a row is absent; this form cannot say so.
    """
    schema = record.schema
    ids_TLK = record.complete_ids(
        "vLLM's form has no mask for them, so slice to valid rows or choose another format"
    )
    shape = (record.num_rows, schema.num_hidden_layers, schema.top_k)
    ids_THK = np.zeros(shape, schema.dtype.newbyteorder("<"))
    ids_THK[:, list(schema.layer_ids)] = ids_TLK
    file = io.BytesIO()
    np.save(file, ids_THK, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode("ascii")


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
    tokens_T = as_token_ids(token_ids)
    num_rows = len(tokens_T) - 1 - start
    if start < 0 or num_rows < 0:
        raise FormatError(f"start={start} lies outside a sequence of {len(tokens_T)} tokens")
    shape = (num_rows, schema.num_hidden_layers, schema.top_k)
    ids_THK = _read_npy(_decode_base64(text), schema.dtype, shape)
    _check_dense(ids_THK, schema)
    ids_TLK = ids_THK[:, list(schema.layer_ids)]
    _check_computed(ids_TLK, schema, start)
    return RoutedExperts.from_rows(
        schema,
        ids_TLK,
        tokens_T,
        start,
        origin_T=np.full(num_rows, Origin.TRANSFERRED, np.uint8),
        version_T=weight_version,
    )


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise FormatError(f"routed_experts is not base64: {error}") from error


def _read_npy(
    data: bytes, dtype: np.dtype[np.unsignedinteger], shape: tuple[int, int, int]
) -> RouteIds:
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
    _check_shape(tuple(int(size) for size in match.groups()[2:]), shape)
    given, expected = len(data) - data_at, int(np.prod(shape)) * dtype.itemsize
    if given < expected:
        raise TruncatedError(f"the array takes {expected} bytes, but only {given} are there")
    if given > expected:
        raise DamagedError(f"{given - expected} bytes follow the array")
    ids: RouteIds = np.frombuffer(data, found, offset=data_at).reshape(shape)
    return ids.astype(dtype, copy=False)


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


def _check_shape(found: tuple[int, ...], shape: tuple[int, int, int]) -> None:
    if found[1:] != shape[1:]:
        raise FormatError(
            f"the array has {found[1]} layers and top-k {found[2]}; this model has "
            f"{shape[1]} hidden layers and top-k {shape[2]}"
        )
    if found[0] != shape[0]:
        raise FormatError(
            f"the array has {found[0]} rows, but the tokens after the start leave {shape[0]}; pass "
            "all tokens of the sequence, and the start that was asked for"
        )


def _check_dense(ids_THK: RouteIds, schema: RouteSchema) -> None:
    is_dense_H = np.ones(schema.num_hidden_layers, np.bool_)
    is_dense_H[list(schema.layer_ids)] = False
    # First over the rows: that pass is vectorised, one over the short last axis is not.
    used_HK = np.asarray(ids_THK.any(axis=0))
    used_H = used_HK.any(axis=1) & is_dense_H
    if used_H.any():
        raise FormatError(
            f"layer {int(np.flatnonzero(used_H)[0])} has ids, but the schema names only the layers "
            f"{list(schema.layer_ids)}; check layer_ids"
        )


def _check_computed(ids_TLK: RouteIds, schema: RouteSchema, start: int) -> None:
    """No top-k picks expert 0 twice: a row that begins so is a row of zeros, never written."""
    if schema.top_k == 1:
        return
    missing_TL = (ids_TLK[:, :, 0] | ids_TLK[:, :, 1]) == 0
    if missing_TL.any():
        row, layer = np.argwhere(missing_TL)[0]
        raise FormatError(
            f"the row at position {start + int(row)}, layer {schema.layer_ids[layer]}, is "
            f"{ids_TLK[row, layer]}: it was not captured, so its experts are not known"
        )
