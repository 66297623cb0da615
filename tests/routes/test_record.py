"""The record against a model of it: a plain dict from position to what was computed there."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from routebook.errors import RecordError, SchemaMismatchError, SpanError, TokenMismatchError
from routebook.routes import Origin, Provenance, RoutedExperts, token_hashes
from tests.routes.strategies import (
    make_record,
    make_schema,
    random_ids,
    records,
    rows_and_tokens,
    tokens,
)

Model = dict[int, tuple[list[list[int]], Origin, int]]


def model_of(record: RoutedExperts) -> Model:
    """Read a record through its public fields alone: position -> (ids, origin, weight version)."""
    model: Model = {}
    for span in record.provenance:
        for position in range(span.start, span.stop):
            row = position - record.start
            assert record.valid_T[row]
            model[position] = (record.ids_TLK[row].tolist(), span.origin, span.weight_version)
    assert len(model) == record.valid_T.sum()
    return model


def spans_of_two(data: st.DataObject, record: RoutedExperts) -> tuple[int, int]:
    position = st.integers(record.start, record.stop)
    a, b = data.draw(position), data.draw(position)
    return min(a, b), max(a, b)


def fields_of(record: RoutedExperts, **changes: object) -> dict[str, object]:
    return {**vars(record), **changes}


@given(rows_and_tokens())
def test_a_record_holds_the_rows_that_it_was_made_from(made):
    record, token_ids, ids = made
    assert (record.num_rows, record.stop) == (len(ids), record.start + len(ids))
    assert record.complete == (len(model_of(record)) == len(ids))
    for position, (row, _, _) in model_of(record).items():
        assert row == ids[position - record.start].tolist()
    assert (record.ids_TLK[~record.valid_T] == record.schema.absent).all()
    hashes = token_hashes(token_ids)
    assert record.token_hash_T.tolist() == hashes[record.start : record.stop].tolist()
    record.check_tokens(token_ids)
    record.check_distinct()


@given(records(), st.data())
def test_slice_keeps_exactly_the_positions_within(record, data):
    start, stop = spans_of_two(data, record)
    part = record.slice(start, stop)
    assert (part.start, part.stop) == (start, stop)
    assert model_of(part) == {p: row for p, row in model_of(record).items() if start <= p < stop}
    assert part.truncate(start) == record.slice(start, start)


@given(rows_and_tokens(), st.lists(st.integers(0, 12), max_size=4))
def test_slices_join_to_the_record_that_they_were_cut_from(made, cuts):
    record, token_ids, _ = made
    edges = sorted(min(record.start + cut, record.stop) for cut in cuts)
    edges = [record.start, *edges, record.stop]
    parts = [record.slice(a, b) for a, b in pairwise(edges)]
    assert RoutedExperts.concat(parts) == record
    for part in parts:
        part.check_tokens(token_ids)


@given(records(), st.data())
def test_append_refuses_what_does_not_follow(record, data):
    start, stop = spans_of_two(data, record)
    left, right = record.truncate(start), record.slice(stop, record.stop)
    if start == stop:
        assert left.append(right) == record
    else:
        with pytest.raises(SpanError, match="slice it"):
            left.append(right)


def test_append_refuses_another_history_of_tokens():
    record = make_record(6)
    other = RoutedExperts.from_rows(record.schema, record.ids_TLK[3:], [7, *tokens(8)[1:]], start=3)
    with pytest.raises(TokenMismatchError, match="record 1 follows other tokens before position 3"):
        record.truncate(3).append(other)


def test_append_refuses_another_schema():
    record = make_record(6)
    schema = make_schema(layer_ids=(0, 3))
    other = RoutedExperts.from_rows(schema, record.ids_TLK[3:], tokens(7), start=3)
    with pytest.raises(SchemaMismatchError):
        record.truncate(3).append(other)


def test_joining_nothing_is_refused():
    with pytest.raises(SpanError, match="at least one"):
        RoutedExperts.concat([])


@pytest.mark.parametrize("span", [(1, 3), (2, 9), (4, 3), (-1, 2)])
def test_a_slice_outside_the_record_is_refused(span):
    with pytest.raises(SpanError):
        make_record(6, start=2).slice(*span)


@given(rows_and_tokens())
def test_padding_adds_absent_rows_and_nothing_else(made):
    record, token_ids, _ = made
    padded = record.pad(token_ids)
    assert padded.stop == len(token_ids)
    assert model_of(padded) == model_of(record)
    assert padded.truncate(record.stop) == record
    padded.check_tokens(token_ids)


def test_padding_refuses_fewer_or_other_tokens():
    record = make_record(6)
    with pytest.raises(SpanError, match="truncate"):
        record.pad(tokens(5))
    with pytest.raises(TokenMismatchError):
        record.pad([1, *tokens(9)[1:]])


@given(rows_and_tokens(), st.data())
def test_a_changed_token_is_named_by_its_position(made, data):
    record, token_ids, _ = made
    assume(record.num_rows)
    position = data.draw(st.integers(record.start, record.stop - 1))
    token_ids[position] ^= 1
    with pytest.raises(
        TokenMismatchError, match=rf"position {position} was .* {token_ids[position]}"
    ):
        record.check_tokens(token_ids)


@given(rows_and_tokens(), st.data())
def test_tokens_behind_the_rows_are_not_looked_at(made, data):
    record, token_ids, _ = made
    record.check_tokens(token_ids[: record.stop] + data.draw(st.lists(st.integers(0, 9))))


def test_a_changed_token_before_the_start_is_noticed():
    record = make_record(4, start=3)
    with pytest.raises(TokenMismatchError, match="before position 3"):
        record.check_tokens([1, *tokens(8)[1:]])


def test_too_few_tokens_are_noticed():
    with pytest.raises(TokenMismatchError, match="end at position 7, but there are only 6"):
        make_record(4, start=3).check_tokens(tokens(6))


@pytest.mark.parametrize(
    ("given", "first", "shift"),
    [
        ([1, *tokens(9)], 0, "+1"),
        ([1, 2, *tokens(9)], 0, "+2"),
        ([*tokens(10)[1:], 5], 0, "-1"),
        ([*tokens(12)[3:], 5], 0, "-3"),
        ([*tokens(3), 1, *tokens(9)[3:]], 3, "+1"),
        ([*tokens(3), *tokens(10)[5:], 1, 2, 3], 3, "-2"),
    ],
)
def test_a_shift_is_named(given, first, shift):
    with pytest.raises(TokenMismatchError, match=f"position {first} .* shifted by \\{shift}$"):
        make_record(8).check_tokens(given)


def test_a_shift_is_named_in_a_record_that_starts_later():
    record = make_record(6).slice(2, 6)
    with pytest.raises(TokenMismatchError, match=r"position 4 .* shifted by \+1$"):
        record.check_tokens([*tokens(4), 7, *tokens(9)[4:]])


def test_tokens_that_are_not_shifted_are_not_called_so():
    with pytest.raises(TokenMismatchError) as caught:
        make_record(6).check_tokens([9, 8, 7, 6, 5, 4, 3])
    assert "shifted" not in str(caught.value)


@given(records())
def test_equality_is_by_value(record):
    assert record == RoutedExperts(**fields_of(record))
    assert record == copy.deepcopy(record)
    assert record == pickle.loads(pickle.dumps(record))
    assert record != record.schema


def variants() -> list[RoutedExperts]:
    record = make_record(6)
    ids = record.ids_TLK.copy()
    ids[3, 1] = ids[3, 1, ::-1]
    versions = np.array([0, 0, 0, 0, 0, 1], np.uint32)
    origins = np.array([1, 1, 1, 1, 2, 0], np.uint8)
    made = RoutedExperts.from_rows
    return [
        record,
        made(record.schema, ids, tokens(7)),
        made(record.schema, record.ids_TLK, tokens(7), version_T=versions),
        made(record.schema, record.ids_TLK, tokens(7), origin_T=origins),
        made(record.schema, record.ids_TLK, tokens(7)[::-1]),
        made(make_schema(layer_ids=(1, 2)), record.ids_TLK, tokens(7)),
        make_record(6, start=1),
        record.truncate(5),
    ]


def test_every_field_counts_for_equality():
    made = variants()
    for i, a in enumerate(made):
        assert [a == b for b in made] == [i == j for j in range(len(made))]


def test_a_record_cannot_be_hashed():
    with pytest.raises(TypeError):
        hash(make_record())


@given(records())
def test_arrays_cannot_be_written_even_after_a_pickle(record):
    for made in (record, pickle.loads(pickle.dumps(record))):
        for array in (made.ids_TLK, made.valid_T, made.token_hash_T):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


def test_a_complete_record_is_a_view_of_what_was_given():
    ids = random_ids(make_schema(), 5, 0)
    record = RoutedExperts.from_rows(make_schema(), ids, tokens(6))
    assert np.shares_memory(record.ids_TLK, ids)
    assert np.shares_memory(record.slice(1, 3).ids_TLK, ids)


def test_making_a_record_does_not_touch_the_given_rows():
    ids = random_ids(make_schema(), 2, 0)
    before = ids.copy()
    origins = np.array([Origin.ABSENT, Origin.DECODE], np.uint8)
    record = RoutedExperts.from_rows(make_schema(), ids, tokens(2), origin_T=origins)
    assert np.array_equal(ids, before)
    assert (record.ids_TLK[0] == 255).all()


def test_an_id_that_no_expert_has_is_named_with_its_place():
    ids = random_ids(make_schema(), 6, 0)
    ids[4, 1, 0] = 16
    place = r"row 4 \(position 6\), layer 3 \(entry 1 of the layer axis\) names expert 16"
    with pytest.raises(SchemaMismatchError, match=place):
        RoutedExperts.from_rows(make_schema(), ids, tokens(9), start=2)


def test_an_absent_row_may_hold_anything():
    ids = np.full(make_schema().shape(2), 200, np.uint8)
    ids[1] = [[0, 1], [2, 3]]
    origins = np.array([Origin.ABSENT, Origin.PREFILL], np.uint8)
    record = RoutedExperts.from_rows(make_schema(), ids, tokens(2), origin_T=origins)
    assert model_of(record) == {1: ([[0, 1], [2, 3]], Origin.PREFILL, 0)}


def test_the_largest_id_of_a_byte_is_an_expert_where_there_are_256():
    schema = make_schema(num_experts=256)
    ids = np.full(schema.shape(1), 255, np.uint8)
    ids[..., 0] = 0
    assert RoutedExperts.from_rows(schema, ids, tokens(1)).complete


@pytest.mark.parametrize("dtype", ["i8", "u2", ">u2", "i1"])
def test_another_dtype_is_refused(dtype):
    ids = random_ids(make_schema(), 2, 0).astype(dtype)
    with pytest.raises(SchemaMismatchError, match="asks for uint8"):
        RoutedExperts.from_rows(make_schema(), ids, tokens(3))


@pytest.mark.parametrize("shape", [(2, 2), (2, 3, 2), (2, 2, 3), (2, 2, 2, 1)])
def test_another_shape_is_refused(shape):
    with pytest.raises(SchemaMismatchError, match=r"\[rows, 2, 2\]"):
        RoutedExperts.from_rows(make_schema(), np.zeros(shape, np.uint8), tokens(3))


@pytest.mark.parametrize(("start", "count"), [(0, 5), (2, 7), (-1, 6)])
def test_rows_without_all_their_tokens_are_refused(start, count):
    ids = random_ids(make_schema(), 6, 0)
    with pytest.raises(TokenMismatchError):
        RoutedExperts.from_rows(make_schema(), ids, tokens(count), start)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"start": -1}, SpanError),
        ({"start": 2**32 - 5, "valid_T": np.zeros(6, np.bool_), "provenance": ()}, SpanError),
        ({"valid_T": np.ones(5, np.bool_)}, SpanError),
        ({"valid_T": np.ones(6, np.uint8)}, SpanError),
        ({"token_hash_T": np.zeros(7, np.uint32)}, SpanError),
        ({"token_hash_T": np.zeros(6, np.int64)}, SpanError),
        ({"provenance": ()}, SpanError),
        ({"provenance": (Provenance(2, 7, 0, Origin.PREFILL),)}, SpanError),
        ({"provenance": (Provenance(2, 9, 0, Origin.PREFILL),)}, SpanError),
        ({"provenance": (Provenance(1, 8, 0, Origin.PREFILL),)}, SpanError),
        ({"valid_T": np.zeros(6, np.bool_)}, SpanError),
        ({"prefix_hash": -1}, TokenMismatchError),
        ({"prefix_hash": 2**32}, TokenMismatchError),
        ({"start": 0, "provenance": (Provenance(0, 6, 0, Origin.PREFILL),)}, TokenMismatchError),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes, error):
    with pytest.raises(error):
        RoutedExperts(**fields_of(make_record(6, start=2), **changes))


def test_provenance_is_kept_in_its_longest_ranges():
    singles = tuple(Provenance(i, i + 1, 0, Origin.PREFILL) for i in range(6))
    record = make_record(6)
    assert RoutedExperts(**fields_of(record, provenance=singles)) == record


def test_an_expert_named_twice_is_found_with_its_place():
    ids = random_ids(make_schema(), 6, 0)
    ids[3, 0] = 7
    record = RoutedExperts.from_rows(make_schema(), ids, tokens(7))
    with pytest.raises(RecordError, match=r"position 3\), layer 1 .*twice: \[7 7\]"):
        record.check_distinct()


def test_absent_rows_are_not_searched_for_experts_named_twice():
    origins = np.array([Origin.ABSENT], np.uint8)
    ids = np.zeros(make_schema().shape(1), np.uint8)
    RoutedExperts.from_rows(make_schema(), ids, tokens(1), origin_T=origins).check_distinct()


@given(records(), st.sampled_from([-1, -5, 65536]))
def test_to_array_marks_absent_rows_so_that_no_expert_can_be_meant(record, absent):
    array = record.to_array(absent=absent)
    assert (array[~record.valid_T] == absent).all()
    assert np.array_equal(array[record.valid_T], record.ids_TLK[record.valid_T])


def test_the_dtype_of_an_array_depends_on_the_schema_alone():
    empty = make_record(6).truncate(0)
    assert empty.to_array(absent=-1).dtype == make_record(6).to_array(absent=-1).dtype == np.int16


def test_to_array_refuses_to_hide_absent_rows():
    record = make_record(6).pad(tokens(9))
    with pytest.raises(RecordError, match="3 of 9 rows are absent, the first at position 6"):
        record.to_array()
    with pytest.raises(RecordError, match="absent=0 is an expert"):
        record.to_array(absent=0)
    assert make_record(6).to_array().tolist() == make_record(6).ids_TLK.tolist()


def test_repr_is_one_short_line():
    assert repr(make_record(6).pad(tokens(9))) == (
        "RoutedExperts(positions [0, 9), 6 valid, 2 layers, top 2 of 16)"
    )


@pytest.mark.parametrize("version", [-1, 2**32, 1.9, [0, -1, 2]])
def test_weight_versions_are_refused_rather_than_wrapped(version: object) -> None:
    record = make_record(3)
    with pytest.raises(RecordError, match="not whole numbers below"):
        RoutedExperts.from_rows(
            record.schema,
            record.ids_TLK,
            [100, 101, 102],
            version_T=version,  # type: ignore[arg-type]
        )
