"""Arrays of ids without a description of their own: how many there must be, and what they become.

Legend of shape suffixes: T = rows, H = hidden layers, L = MoE layers, K = top-k.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from routebook.errors import DamagedError, FormatError, TruncatedError
from routebook.routes.formats.hidden_layers import Ids, check_computed, narrowed, take_moe_layers
from routebook.routes.formats.tokens_after import TokensAfter
from routebook.routes.provenance import Origin, Provenance
from routebook.routes.record import Mask, RoutedExperts
from routebook.routes.schema import RouteSchema


def check_shape(found: tuple[int, ...], shape: tuple[int, int, int]) -> None:
    """Check the shape that a value claims.

    Raises:
        FormatError: another one than schema and tokens ask for.
    """
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


def read_ids(data: memoryview | bytes, dtype: np.dtype[Any], shape: tuple[int, int, int]) -> Ids:
    """Bytes as an array, a read-only view on a little-endian machine.

    Raises:
        TruncatedError: too few bytes.
        DamagedError: too many.
    """
    given, expected = len(data), math.prod(shape) * dtype.itemsize
    if given < expected:
        raise TruncatedError(f"the array takes {expected} bytes, but only {given} are there")
    if given > expected:
        raise DamagedError(f"{given - expected} bytes follow the array")
    ids: Ids = np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape)
    return ids.astype(dtype.newbyteorder("="), copy=False)


def record_of_hidden_layers(
    ids_THK: Ids, schema: RouteSchema, tokens: TokensAfter, weight_version: int
) -> RoutedExperts:
    """The record of ids `[T, H, K]` of any integer type, all rows valid.

    Raises:
        FormatError: ids in a dense layer, or a row that is all zeros.
        RecordError: an id that no expert has.
    """
    ids_TLK = take_moe_layers(ids_THK, schema)
    return record_of_ids(ids_TLK, schema, tokens, weight_version)


def record_of_ids(
    ids_TLK: Ids,
    schema: RouteSchema,
    tokens: TokensAfter,
    weight_version: int,
    valid_T: Mask | None = None,
) -> RoutedExperts:
    """The record of rows that say nothing about themselves; their origin is `TRANSFERRED`.

    Args:
        ids_TLK: `[T, L, K]` of any integer type.
        schema: what the axes mean.
        tokens: those of the rows.
        weight_version: one for all rows.
        valid_T: bool `[T]`; all rows without it.

    Raises:
        FormatError: a row that is all zeros.
        RecordError: an id that no expert has, or a weight version outside `[0, 2**32)`.
    """
    check_computed(ids_TLK, schema, tokens.start)
    if valid_T is None:
        valid_T = np.ones(len(ids_TLK), np.bool_)
    return RoutedExperts(
        schema=schema,
        ids_TLK=narrowed(ids_TLK, schema, tokens.start),
        start=tokens.start,
        valid_T=valid_T,
        provenance=_provenance(valid_T, tokens.start, weight_version),
        prefix_hash=tokens.prefix_hash,
        token_hash_T=tokens.hashes(),
    )


def _provenance(valid_T: Mask, start: int, weight_version: int) -> tuple[Provenance, ...]:
    """Maximal ranges of valid rows."""
    edges = np.flatnonzero(np.diff(valid_T, prepend=False, append=False)) + start
    return tuple(
        Provenance(int(a), int(b), weight_version, Origin.TRANSFERRED)
        for a, b in edges.reshape(-1, 2)
    )
