"""Records whose ids say where they belong: a row that lands elsewhere, or of another turn, names itself."""

from __future__ import annotations

import numpy as np

from routebook.routes import Origin, RoutedExperts, RouteSchema

TOP_K = 2
_POSITIONS = 64
_LAYERS = 8


def tagged_schema(layer_ids: tuple[int, ...], num_hidden_layers: int) -> RouteSchema:
    return RouteSchema(
        layer_ids=layer_ids,
        num_experts=2**16,
        top_k=TOP_K,
        num_hidden_layers=num_hidden_layers,
    )


def tag_ids(schema: RouteSchema, owner: int, positions: np.ndarray) -> np.ndarray:
    """`[positions, L, K]`, a different id for every owner, position, layer and pick."""
    rows = owner * _POSITIONS + np.asarray(positions)[:, None, None]
    layers = np.array(schema.layer_ids)[None, :, None]
    ids = (rows * _LAYERS + layers) * TOP_K + np.arange(TOP_K)[None, None]
    assert ids.size == 0 or ids.max() < schema.num_experts
    return ids.astype(schema.dtype)


def read_tag(ids_K: np.ndarray) -> tuple[int, int, int]:
    """Owner, position and layer of one row's picks in one layer."""
    first = int(ids_K[0])
    assert ids_K.tolist() == [first + k for k in range(TOP_K)]
    rest, layer = divmod(first // TOP_K, _LAYERS)
    owner, position = divmod(rest, _POSITIONS)
    return owner, position, layer


def tagged_record(
    schema: RouteSchema,
    owner: int,
    tokens: list[int],
    span: tuple[int, int],
    *,
    absent: frozenset[int] = frozenset(),
    version: int = 0,
) -> RoutedExperts:
    """Rows of one owner at the positions of a span, but for the absent ones."""
    positions = np.arange(*span)
    origins = [Origin.ABSENT if p in absent else Origin.DECODE for p in positions.tolist()]
    return RoutedExperts.from_rows(
        schema,
        tag_ids(schema, owner, positions),
        tokens,
        span[0],
        origin_T=np.array(origins, np.uint8),
        version_T=version,
    )
