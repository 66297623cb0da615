"""Comparison: are these the same choices, how many differ, and which is the first that does?

Legend of shape suffixes: T = rows, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routebook.errors import SchemaMismatchError, SpanError, TokenMismatchError
from routebook.routes.record import Mask, RoutedExperts

Ids = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Difference:
    """One row that was routed differently, in one layer."""

    position: int
    layer_id: int
    a_ids: tuple[int, ...]
    b_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Counts of rows and of pairs (row, layer). `num_rows` is the sum of the three that follow it."""

    num_rows: int
    equal_rows: int
    """Rows that are equal in every layer."""

    different_rows: int
    absent_rows: int
    """Rows that one side or both lack; nothing is said about them."""

    num_layers: int
    equal_pairs: int
    different_pairs: int
    first_difference: Difference | None
    """The difference at the lowest position and, there, in the lowest layer."""


def compare(a: RoutedExperts | Ids, b: RoutedExperts | Ids, order: bool = True) -> Comparison:
    """Compare two records, or arrays `[T, L, K]`, or one of each, row by row.

    Args:
        a: one side. An array is taken to describe the rows and layers of the record that it is
            compared with; two arrays, positions and layers from 0 on.
        b: the other side.
        order: whether the order of the ids within a row counts.

    Raises:
        SchemaMismatchError: the schemas or shapes differ.
        SpanError: the records cover other positions; slice them to a common span first.
        TokenMismatchError: the records belong to other tokens.
    """
    if isinstance(a, RoutedExperts) and isinstance(b, RoutedExperts):
        _check_comparable(a, b)
    a_TLK, b_TLK = _ids_of(a), _ids_of(b)
    if a_TLK.ndim != 3 or a_TLK.shape != b_TLK.shape:
        raise SchemaMismatchError(
            f"ids of shape {list(a_TLK.shape)} and {list(b_TLK.shape)} cannot be compared; both "
            "must be the same [rows, layers, top_k]"
        )
    valid_T = _valid_of(a) & _valid_of(b)
    equal_TL = _equal(a_TLK, b_TLK, order)
    return _count(equal_TL, valid_T, _first_difference(equal_TL, valid_T, a, b))


def _check_comparable(a: RoutedExperts, b: RoutedExperts) -> None:
    if a.schema != b.schema:
        raise SchemaMismatchError(f"{a.schema} and {b.schema} cannot be compared")
    if (a.start, a.stop) != (b.start, b.stop):
        raise SpanError(
            f"positions [{a.start}, {a.stop}) and [{b.start}, {b.stop}) cannot be compared; "
            "slice both to a common span"
        )
    if not np.array_equal(a.token_hash_T, b.token_hash_T):
        raise TokenMismatchError(
            "the records belong to other tokens; slice both to the tokens that they share"
        )


def _ids_of(side: RoutedExperts | Ids) -> Ids:
    return side.ids_TLK if isinstance(side, RoutedExperts) else side


def _valid_of(side: RoutedExperts | Ids) -> Mask:
    return side.valid_T if isinstance(side, RoutedExperts) else np.ones(len(side), np.bool_)


def _equal(a_TLK: Ids, b_TLK: Ids, order: bool) -> Mask:
    if not order:
        a_TLK, b_TLK = np.sort(a_TLK, axis=2), np.sort(b_TLK, axis=2)
    equal_TL: Mask = (a_TLK == b_TLK).all(axis=2)
    return equal_TL


def _count(equal_TL: Mask, valid_T: Mask, first: Difference | None) -> Comparison:
    num_rows, num_layers = equal_TL.shape
    compared = int(valid_T.sum())
    equal_rows = int(equal_TL[valid_T].all(axis=1).sum())
    equal_pairs = int(equal_TL[valid_T].sum())
    return Comparison(
        num_rows=num_rows,
        equal_rows=equal_rows,
        different_rows=compared - equal_rows,
        absent_rows=num_rows - compared,
        num_layers=num_layers,
        equal_pairs=equal_pairs,
        different_pairs=compared * num_layers - equal_pairs,
        first_difference=first,
    )


def _first_difference(
    equal_TL: Mask, valid_T: Mask, a: RoutedExperts | Ids, b: RoutedExperts | Ids
) -> Difference | None:
    different_TL = ~equal_TL & valid_T[:, None]
    if not different_TL.any():
        return None
    row, layer = (int(index) for index in np.argwhere(different_TL)[0])
    start, layer_ids = _axes_of(a if isinstance(a, RoutedExperts) else b)
    return Difference(
        position=start + row,
        layer_id=layer_ids[layer] if layer_ids else layer,
        a_ids=tuple(_ids_of(a)[row, layer].tolist()),
        b_ids=tuple(_ids_of(b)[row, layer].tolist()),
    )


def _axes_of(side: RoutedExperts | Ids) -> tuple[int, tuple[int, ...]]:
    """Position of the first row, and names of the layers, where there are any."""
    return (side.start, side.schema.layer_ids) if isinstance(side, RoutedExperts) else (0, ())
