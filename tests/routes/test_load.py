from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routebook.errors import RecordError, SchemaMismatchError
from routebook.routes import Origin, RoutedExperts, expert_load
from tests.routes.strategies import make_record, make_schema, random_ids, records, tokens


@given(records(), st.data())
def test_counts_are_those_of_counting_one_by_one(record, data):
    cut = data.draw(st.integers(record.start, record.stop))
    parts = [record.truncate(cut), record.slice(cut, record.stop)]
    if not record.valid_T.any():
        with pytest.raises(RecordError, match="no valid row"):
            expert_load(parts)
        return
    counted = Counter(
        (layer, int(expert))
        for row in np.flatnonzero(record.valid_T)
        for layer in range(record.schema.num_layers)
        for expert in record.ids_TLK[row, layer]
    )
    for load in (expert_load(record), expert_load(iter(parts))):
        assert load.counts_LE.shape == (record.schema.num_layers, record.schema.num_experts)
        assert {tuple(at): load.counts_LE[tuple(at)] for at in np.argwhere(load.counts_LE)} == (
            counted
        )
        assert load.num_rows == record.valid_T.sum()


def load_of(num_experts: int, picks: list[list[int]]):
    """Load of one layer, one row per list of picks."""
    schema = make_schema(num_experts=num_experts, top_k=len(picks[0]), layer_ids=(2,))
    ids = np.array(picks, schema.dtype)[:, None]
    return expert_load(RoutedExperts.from_rows(schema, ids, tokens(len(picks))))


def test_balanced_load():
    load = load_of(4, [[0, 1], [2, 3], [1, 0], [3, 2]])
    assert load.counts_LE.tolist() == [[2, 2, 2, 2]]
    assert load.entropy.tolist() == [2.0]
    assert load.relative_entropy.tolist() == [1.0]
    assert load.busiest_share.tolist() == [0.25]
    assert load.variation.tolist() == [0.0]


def test_collapsed_load():
    load = load_of(4, [[3], [3], [3]])
    assert load.entropy.tolist() == [0.0]
    assert math.copysign(1, load.entropy[0]) == 1
    assert load.busiest_share.tolist() == [1.0]
    assert load.variation[0] == pytest.approx(math.sqrt(3))


def test_skewed_load():
    load = load_of(4, [[0], [0], [1], [2]])
    assert load.entropy[0] == pytest.approx(1.5)
    assert load.relative_entropy[0] == pytest.approx(0.75)
    assert load.busiest_share[0] == 0.5
    assert load.variation[0] == pytest.approx(math.sqrt(0.5))


def test_a_single_expert_is_balanced():
    assert load_of(1, [[0], [0]]).relative_entropy.tolist() == [1.0]


def test_more_rows_than_are_counted_at_a_time():
    schema = make_schema(num_experts=256, top_k=1, layer_ids=(0,))
    ids = (np.arange(10_000) % 256).astype(np.uint8).reshape(-1, 1, 1)
    load = expert_load(RoutedExperts.from_rows(schema, ids, range(10_000)))
    assert load.counts_LE[0].tolist() == [40 if expert < 16 else 39 for expert in range(256)]


def test_absent_rows_do_not_count_even_where_their_filler_is_an_expert():
    schema = make_schema(num_experts=256, top_k=1)
    origins = np.array([Origin.PREFILL, Origin.ABSENT], np.uint8)
    ids = random_ids(schema, 2, 0) % 255
    record = RoutedExperts.from_rows(schema, ids, tokens(2), origin_T=origins)
    assert expert_load(record).counts_LE[:, 255].tolist() == [0, 0]
    assert expert_load(record).counts_LE.sum() == 2


def test_records_of_two_models_are_not_added():
    other = RoutedExperts.from_rows(
        make_schema(layer_ids=(0, 1)), random_ids(make_schema(), 2, 0), tokens(2)
    )
    with pytest.raises(SchemaMismatchError):
        expert_load([make_record(3), other])


def test_no_records_are_refused():
    with pytest.raises(RecordError, match="no valid row"):
        expert_load([])
