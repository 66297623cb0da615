"""Schemas, records and samples for tests: small, with every width of id and every origin of row."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from routebook.routes import Origin, RoutedExperts, RouteSample, RouteSchema

NUM_EXPERTS = (1, 2, 3, 16, 100, 128, 255, 256, 257, 512, 65536)


@st.composite
def schemas(draw: st.DrawFn) -> RouteSchema:
    num_experts = draw(st.sampled_from(NUM_EXPERTS))
    layer_ids = draw(st.sets(st.integers(0, 5), min_size=1, max_size=4))
    return RouteSchema(
        layer_ids=tuple(sorted(layer_ids)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(4, num_experts))),
        num_hidden_layers=6,
    )


def random_ids(schema: RouteSchema, num_rows: int, seed: int) -> np.ndarray:
    """Distinct ids per row and layer, often the largest ones, where widths go wrong."""
    rng = np.random.default_rng(seed)
    low = max(0, schema.num_experts - 2 * schema.top_k) if seed % 2 else 0
    ids = np.empty(schema.shape(num_rows), schema.dtype)
    for row in range(num_rows):
        for layer in range(schema.num_layers):
            picks = rng.choice(schema.num_experts - low, schema.top_k, replace=False)
            ids[row, layer] = low + picks
    return ids


def token_lists(min_size: int, max_size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 2**31 - 1), min_size=min_size, max_size=max_size)


@st.composite
def rows_and_tokens(
    draw: st.DrawFn, *, all_valid: bool = False
) -> tuple[RoutedExperts, list[int], np.ndarray]:
    """A record, all its tokens (one more than rows), and the ids that it was made from."""
    schema = draw(schemas())
    start, num_rows = draw(st.integers(0, 4)), draw(st.integers(0, 9))
    token_ids = draw(token_lists(start + num_rows + 1, start + num_rows + 1))
    ids = random_ids(schema, num_rows, draw(st.integers(0, 2**16)))
    least = Origin.PREFILL if all_valid else Origin.ABSENT
    row = st.tuples(st.integers(least, max(Origin)), st.sampled_from((0, 1, 2**32 - 1)))
    rows = draw(st.lists(row, min_size=num_rows, max_size=num_rows))
    record = RoutedExperts.from_rows(
        schema,
        ids,
        token_ids,
        start,
        origin_T=np.array([origin for origin, _ in rows], np.uint8),
        version_T=np.array([version for _, version in rows], np.uint32),
    )
    return record, token_ids, ids


def records(*, all_valid: bool = False) -> st.SearchStrategy[RoutedExperts]:
    return rows_and_tokens(all_valid=all_valid).map(lambda made: made[0])


@st.composite
def samples(draw: st.DrawFn) -> RouteSample:
    record, token_ids, _ = draw(rows_and_tokens())
    return RouteSample(
        record=record,
        token_ids=np.array(token_ids, np.int32),
        num_prompt_tokens=draw(st.integers(1, len(token_ids))),
        meta=draw(st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3)),
    )


def make_schema(**changes: object) -> RouteSchema:
    fields = {"layer_ids": (1, 3), "num_experts": 16, "top_k": 2, "num_hidden_layers": 4}
    return RouteSchema(**{**fields, **changes})  # type: ignore[arg-type]


def make_record(num_rows: int = 6, start: int = 0, seed: int = 0) -> RoutedExperts:
    """A complete record of the tokens 100, 101, ..."""
    schema = make_schema()
    ids = random_ids(schema, start + num_rows, seed)[start:]
    return RoutedExperts.from_rows(schema, ids, tokens(start + num_rows + 1), start)


def make_sample(num_rows: int = 6, seed: int = 0, **meta: str) -> RouteSample:
    return RouteSample(
        record=make_record(num_rows, seed=seed),
        token_ids=np.array(tokens(num_rows + 1), np.int32),
        num_prompt_tokens=1,
        meta=meta,
    )


def tokens(count: int) -> list[int]:
    return list(range(100, 100 + count))
