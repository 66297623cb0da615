"""The layer axis of formats that list every hidden layer, dense ones as zeros.

Legend of shape suffixes: T = rows, H = hidden layers, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from routebook.errors import FormatError, SchemaMismatchError
from routebook.routes.record import RouteIds
from routebook.routes.schema import RouteSchema

Ids = npt.NDArray[np.integer]

_BLOCK_NBYTES = 512 * 1024
"""Bytes made at a time: they stay in the processor's cache, and no step is long."""


def hidden_shape(schema: RouteSchema, num_rows: int) -> tuple[int, int, int]:
    """Shape `[T, H, K]`."""
    return (num_rows, schema.num_hidden_layers, schema.top_k)


def hidden_layer_blocks(
    ids_TLK: RouteIds, schema: RouteSchema, dtype: np.dtype[Any]
) -> Iterator[memoryview]:
    """The bytes of `[T, H, K]` in `dtype`, some rows at a time; a block is valid until the next.

    Args:
        ids_TLK: `[T, L, K]` in the schema's dtype.
        schema: which of the hidden layers these are.
        dtype: little-endian.
    """
    row_nbytes = schema.num_hidden_layers * schema.top_k * dtype.itemsize
    num_rows = max(1, _BLOCK_NBYTES // row_nbytes)
    if schema.num_layers == schema.num_hidden_layers and ids_TLK.dtype == dtype:
        for at in range(0, len(ids_TLK), num_rows):
            yield _bytes_of(ids_TLK[at : at + num_rows])
        return
    block_THK = np.zeros(hidden_shape(schema, min(num_rows, len(ids_TLK))), dtype)
    runs = list(_layer_runs(schema))
    for at in range(0, len(ids_TLK), num_rows):
        rows_TLK = ids_TLK[at : at + num_rows]
        for hidden, moe in runs:
            block_THK[: len(rows_TLK), hidden] = rows_TLK[:, moe]
        yield _bytes_of(block_THK[: len(rows_TLK)])


def take_moe_layers(ids_THK: Ids, schema: RouteSchema) -> Ids:
    """The MoE layers `[T, L, K]`; a view where there are no others.

    Raises:
        FormatError: a dense layer holds ids.
    """
    if schema.num_layers == schema.num_hidden_layers:
        return ids_THK
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
    return ids_THK[:, list(schema.layer_ids)]


def check_computed(ids_TLK: Ids, schema: RouteSchema, start: int) -> None:
    """No top-k picks expert 0 twice: a row that begins so is a row of zeros, never written.

    Raises:
        FormatError: such a row, with position and layer.
    """
    if schema.top_k == 1:
        return
    missing_TL = (ids_TLK[:, :, 0] | ids_TLK[:, :, 1]) == 0
    if missing_TL.any():
        row, layer = np.argwhere(missing_TL)[0]
        raise FormatError(
            f"the row at position {start + int(row)}, layer {schema.layer_ids[layer]}, is "
            f"{ids_TLK[row, layer]}: it was not captured, so its experts are not known"
        )


def narrowed(ids_TLK: Ids, schema: RouteSchema, start: int) -> RouteIds:
    """Ids of any integer type in the schema's dtype, checked before a cast could wrap them.

    Raises:
        SchemaMismatchError: an id that no expert has, with position and layer.
    """
    # Ids of the schema's own dtype are checked by the record.
    narrow = ids_TLK.dtype == schema.dtype
    if not narrow and ids_TLK.size and not 0 <= ids_TLK.min() <= ids_TLK.max() < schema.num_experts:
        bad_TLK = (ids_TLK < 0) | (ids_TLK >= schema.num_experts)
        row, layer, pick = np.argwhere(bad_TLK)[0]
        raise SchemaMismatchError(
            f"the row at position {start + int(row)}, layer {schema.layer_ids[layer]}, names expert "
            f"{int(ids_TLK[row, layer, pick])}, but the schema has {schema.num_experts} experts"
        )
    ids: RouteIds = ids_TLK.astype(schema.dtype, copy=False)
    return ids


def _bytes_of(array: Ids) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _layer_runs(schema: RouteSchema) -> Iterator[tuple[slice, slice]]:
    """Neighbouring layers, as slices of the hidden and of the MoE layers: slices copy fastest."""
    layer_ids = schema.layer_ids
    first = 0
    for entry in range(1, len(layer_ids) + 1):
        if entry == len(layer_ids) or layer_ids[entry] != layer_ids[entry - 1] + 1:
            yield slice(layer_ids[first], layer_ids[entry - 1] + 1), slice(first, entry)
            first = entry
