from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routebook.errors import SchemaMismatchError, SpanError, TokenMismatchError
from routebook.routes import Difference, Origin, RoutedExperts, compare
from tests.routes.strategies import make_record, make_schema, random_ids, tokens


def record_of(ids: np.ndarray, absent: list[int], start: int = 2) -> RoutedExperts:
    origins = np.full(len(ids), Origin.DECODE, np.uint8)
    origins[absent] = Origin.ABSENT
    count = start + len(ids) + 1
    return RoutedExperts.from_rows(make_schema(), ids, tokens(count), start, origin_T=origins)


ROWS = st.sets(st.integers(0, 7), max_size=4).map(sorted)
CHANGES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 1), st.booleans()), max_size=5)


@given(ROWS, ROWS, CHANGES, st.booleans())
def test_counts_are_those_of_comparing_one_by_one(a_absent, b_absent, changes, order):
    a_ids = random_ids(make_schema(), 8, 0)
    b_ids = a_ids.copy()
    for row, layer, swap in changes:
        b_ids[row, layer] = a_ids[row, layer, ::-1] if swap else (a_ids[row, layer] + 1) % 16
    seen = {"equal": 0, "different": 0, "absent": 0, "pairs": 0}
    first = None
    for row in range(8):
        if row in a_absent or row in b_absent:
            seen["absent"] += 1
            continue
        equal = []
        for layer in (0, 1):
            a, b = a_ids[row, layer].tolist(), b_ids[row, layer].tolist()
            equal.append(a == b if order else set(a) == set(b))
            if not equal[-1] and first is None:
                first = Difference(2 + row, (1, 3)[layer], tuple(a), tuple(b))
        seen["pairs"] += sum(equal)
        seen["equal" if all(equal) else "different"] += 1
    result = compare(record_of(a_ids, a_absent), record_of(b_ids, b_absent), order=order)
    assert result.equal_rows == seen["equal"]
    assert result.different_rows == seen["different"]
    assert result.absent_rows == seen["absent"]
    assert result.equal_pairs == seen["pairs"]
    assert result.equal_pairs + result.different_pairs == 2 * (8 - seen["absent"])
    assert result.first_difference == first
    assert (result.num_rows, result.num_layers) == (8, 2)


def test_a_record_can_be_compared_with_an_array_of_any_width():
    record = make_record(4, start=2)
    ids = record.ids_TLK.astype(np.int64)
    assert compare(record, ids).equal_rows == compare(ids, record).equal_rows == 4
    ids[3, 1] = [-1, 300]
    difference = compare(ids, record).first_difference
    expected = tuple(record.ids_TLK[3, 1].tolist())
    assert difference == Difference(5, 3, (-1, 300), expected)


def test_two_arrays_count_positions_and_layers_from_zero():
    a = np.zeros((2, 3, 1), np.uint8)
    b = np.zeros((2, 3, 1), np.uint16)
    b[1, 2] = 1
    assert compare(a, b).first_difference == Difference(1, 2, (0,), (1,))


def test_nothing_compared_with_nothing_has_no_difference():
    result = compare(make_record(3).truncate(0), make_record(3).truncate(0))
    assert (result.num_rows, result.different_rows, result.first_difference) == (0, 0, None)


def test_what_does_not_belong_together_is_not_compared():
    record = make_record(6)
    other_layers = RoutedExperts.from_rows(make_schema(layer_ids=(0, 1)), record.ids_TLK, tokens(7))
    other_tokens = RoutedExperts.from_rows(record.schema, record.ids_TLK, tokens(9)[2:])
    with pytest.raises(SchemaMismatchError):
        compare(record, other_layers)
    with pytest.raises(SpanError, match="slice both"):
        compare(record, record.truncate(5))
    with pytest.raises(TokenMismatchError):
        compare(record, other_tokens)
    with pytest.raises(SchemaMismatchError, match=r"\[6, 2, 2\] and \[5, 2, 2\]"):
        compare(record, record.ids_TLK[:5])
    with pytest.raises(SchemaMismatchError):
        compare(np.zeros((2, 2)), np.zeros((2, 2)))
