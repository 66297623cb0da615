"""The way back: from what the routers of all ranks chose to a record for each sequence.

Legend of shape suffixes: T = rows of a rank, N = tokens of a sequence, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from routebook.errors import RecordError, SchemaMismatchError, SpanError
from routebook.routes.layout.parallel_plan import ParallelRank
from routebook.routes.layout.rank_rows import RankRows
from routebook.routes.layout.row_layout import Places, RowLayout
from routebook.routes.provenance import Origin
from routebook.routes.record import RoutedExperts
from routebook.routes.schema import RouteSchema
from routebook.routes.token_hash import TokenIds

Ids = npt.NDArray[np.integer]
Mask = npt.NDArray[np.bool_]


def collect_records(
    layout: RowLayout,
    schema: RouteSchema,
    pieces: Mapping[ParallelRank, RankRows],
    token_ids: Sequence[TokenIds],
    *,
    weight_version: int = 0,
) -> list[RoutedExperts]:
    """Join the rows of all ranks and chunks to one record for each sequence.

    Args:
        layout: by which the batch was cut.
        schema: of the whole model.
        pieces: rows of every rank that has some of its own, in the order of `layout.places`; rows that are not
            valid are absent. Ranks that repeat others' rows may be left out or must agree.
        token_ids: all tokens of each sequence, without padding.
        weight_version: of the weights that chose.

    Returns:
        Records of the positions `[0, N)` of each sequence, of origin `PREFILL`.

    Raises:
        SchemaMismatchError: a piece of other layers or another shape than the schema and the layout say.
        SpanError: tokens of other lengths than the layout's, or a position that some layers have and others do not.
        RecordError: two ranks disagree about a row, or an id that no expert has.
    """
    lengths = layout.sequences.lengths
    if tuple(len(tokens) for tokens in token_ids) != lengths:
        raise SpanError(f"token_ids must have the layout's lengths {lengths}")
    # One line over all sequences, so that a piece is placed in one assignment.
    firsts = np.cumsum([0, *lengths])
    ids_NLK = np.full(schema.shape(int(firsts[-1])), -1, np.int64)
    for rank, rows in pieces.items():
        _check_piece(layout, schema, rank, rows)
        _place(ids_NLK, schema, rows, firsts, layout.places(rank))
    return [
        _record(schema, ids_NLK[a:b], tokens, weight_version)
        for a, b, tokens in zip(firsts[:-1], firsts[1:], token_ids, strict=True)
    ]


def _check_piece(
    layout: RowLayout, schema: RouteSchema, rank: ParallelRank, rows: RankRows
) -> None:
    shape = (layout.num_rows, len(rows.layer_ids), schema.top_k)
    unknown = set(rows.layer_ids) - set(schema.layer_ids)
    if rows.ids_TLK.shape != shape or unknown:
        raise SchemaMismatchError(
            f"the rows of {rank} have the shape {rows.ids_TLK.shape} and the layers {rows.layer_ids};"
            f" the layout has {shape[0]} rows, the schema top_k={schema.top_k} and the layers"
            f" {schema.layer_ids}"
        )


def _place(
    ids_NLK: Ids,
    schema: RouteSchema,
    rows: RankRows,
    firsts: npt.NDArray[np.int64],
    places: tuple[Places, Places],
) -> None:
    sequence_T, position_T = places
    taken_T = rows.valid_T & (sequence_T >= 0)
    at_T = firsts[sequence_T[taken_T]] + position_T[taken_T]
    layers = np.searchsorted(schema.layer_ids, rows.layer_ids)
    index = np.ix_(at_T, layers)
    old_TLK, new_TLK = ids_NLK[index], rows.ids_TLK[taken_T].astype(np.int64)
    if new_TLK.size and not 0 <= new_TLK.min() <= new_TLK.max() < schema.num_experts:
        raise RecordError(
            f"a valid row has ids from {new_TLK.min()} to {new_TLK.max()}, but the schema has"
            f" {schema.num_experts} experts"
        )
    if ((old_TLK != new_TLK) & (old_TLK >= 0)).any():
        raise RecordError("two ranks have different choices for one row; are their plans the same?")
    ids_NLK[index] = new_TLK


def _record(
    schema: RouteSchema, ids_NLK: Ids, tokens: TokenIds, weight_version: int
) -> RoutedExperts:
    known_NL: Mask = np.all(ids_NLK >= 0, axis=2)
    valid_N: Mask = np.all(known_NL, axis=1)
    partial_N = np.flatnonzero(np.any(known_NL, axis=1) & ~valid_N)
    if partial_N.size:
        layer = schema.layer_ids[int(np.flatnonzero(~known_NL[partial_N[0]])[0])]
        raise SpanError(
            f"position {partial_N[0]} has rows of some layers but not of layer {layer}; pass the rows"
            " of all pipeline stages and chunks"
        )
    origin_N = np.where(valid_N, Origin.PREFILL, Origin.ABSENT).astype(np.uint8)
    ids = ids_NLK.astype(schema.dtype)
    return RoutedExperts.from_rows(schema, ids, tokens, origin_T=origin_N, version_T=weight_version)
