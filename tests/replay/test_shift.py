"""Misplaced rows are found and named; rows in their place are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routebook.replay.shift import Dummies, PlaceFinder, Shift, Strangers, duplicates, row_faults
from routebook.routes import Origin, RoutedExperts, RouteSchema

SCHEMA = RouteSchema(layer_ids=tuple(range(6)), num_experts=16, top_k=4, num_hidden_layers=6)
ROWS = 40


def choices(seed: int, schema: RouteSchema = SCHEMA, rows: int = ROWS) -> np.ndarray:
    """Ids of unrelated tokens, `[T, L, K]`."""
    scores = np.random.default_rng(seed).random((rows, schema.num_layers, schema.num_experts))
    return scores.argsort(axis=2)[..., : schema.top_k].astype(schema.dtype)


def rerouted(ids: np.ndarray, share: float, seed: int = 9) -> np.ndarray:
    """The same choices after one expert was replaced in some of the (token, layer) pairs."""
    rng = np.random.default_rng(seed)
    ids = ids.copy()
    for row, layer in np.argwhere(rng.random(ids.shape[:2]) < share):
        free = np.setdiff1d(np.arange(16), ids[row, layer])
        ids[row, layer, -1] = rng.choice(free)
    return ids


def record_of(ids: np.ndarray, start: int = 0, absent=()) -> RoutedExperts:
    origins = np.full(len(ids), Origin.DECODE, np.uint8)
    origins[list(absent)] = Origin.ABSENT
    tokens = np.arange(start + len(ids) + 1)
    return RoutedExperts.from_rows(SCHEMA, ids, tokens, start, origin_T=origins)


def fault_of(ids: np.ndarray, own: np.ndarray, valid=None):
    finder = PlaceFinder(top_k=4, num_experts=16)
    finder.add(ids, own, np.ones(len(ids), bool) if valid is None else valid)
    return finder.fault()


@given(rows=st.integers(-2, 2), layers=st.integers(-2, 2), share=st.sampled_from([0.0, 0.3]))
@settings(max_examples=60, deadline=None)
def test_every_small_offset_is_named(rows, layers, share):
    own = choices(1)
    moved = np.roll(rerouted(own, share), (-rows, -layers), axis=(0, 1))
    fault = fault_of(moved, own)
    if rows == layers == 0:
        assert fault is None
        return
    assert isinstance(fault, Shift)
    assert (fault.rows, fault.layers) == (rows, layers)
    assert (f"by {rows:+d} rows" in fault.text) == bool(rows)
    assert (f"by {layers:+d} layers" in fault.text) == bool(layers)


def test_the_offset_says_which_position_a_row_holds():
    """Row t of a record that lost its first row holds the choice of position t + 1."""
    own = choices(1)
    fault = fault_of(own[1:], own[:-1])
    assert isinstance(fault, Shift)
    assert (fault.rows, fault.layers) == (1, 0)


def test_absent_rows_do_not_count_and_two_rows_are_enough():
    own = choices(1)
    ids = own.copy()
    valid = np.ones(ROWS, bool)
    valid[4:] = False
    ids[4:] = choices(2)[4:]
    assert fault_of(ids, own, valid) is None
    assert isinstance(fault_of(ids, own), Strangers)
    assert fault_of(own[:2], own[:2]) is None


def test_unrelated_rows_are_strangers():
    assert isinstance(fault_of(choices(2), choices(1)), Strangers)
    assert fault_of(choices(1)[:0], choices(2)[:0]) is None


@pytest.mark.parametrize("filler", [np.zeros(4), np.arange(4), [5, 1, 2, 9]])
@pytest.mark.parametrize("start", [0, 7])
def test_dummy_rows_are_named_by_their_positions(filler, start):
    own = choices(1)
    ids = rerouted(own, 0.1)
    ids[:8] = filler
    (fault,) = row_faults("request 3", record_of(ids, start), own)
    assert isinstance(fault, Dummies)
    assert (fault.start, fault.stop) == (start, start + 8)
    assert fault.text.startswith(f"request 3: rows [{start}, {start + 8}) are dummies")


def test_a_single_row_of_zeros_is_a_dummy():
    own = choices(1)
    ids = own.copy()
    ids[-1] = 0
    (fault,) = row_faults("r", record_of(ids), own)
    assert isinstance(fault, Dummies)
    assert (fault.start, fault.stop) == (ROWS - 1, ROWS)
    assert np.flatnonzero(duplicates(record_of(ids))).tolist() == [ROWS - 1]


def test_absent_rows_are_no_dummies():
    own = choices(1)
    ids = own.copy()
    ids[3:9] = 0
    assert list(row_faults("r", record_of(ids, absent=range(3, 9)), own)) == []
    assert not duplicates(record_of(ids, absent=range(3, 9))).any()


def test_rerouted_rows_are_no_fault():
    own = choices(1)
    assert list(row_faults("r", record_of(rerouted(own, 0.5)), own)) == []


def test_a_turn_that_is_shifted_is_named_with_its_rows():
    own = choices(1)
    ids = own.copy()
    ids[20:30] = own[19:29]
    (fault,) = row_faults("r", record_of(ids), own)
    assert isinstance(fault, Shift)
    assert (fault.rows, fault.layers) == (-1, 0)
    assert "rows [20, 30)" in fault.text


def test_strange_rows_in_the_midst_are_named():
    own = choices(1)
    ids = own.copy()
    ids[12:18] = choices(2)[12:18]
    (fault,) = row_faults("r", record_of(ids), own)
    assert isinstance(fault, Strangers)
    assert "rows [12, 18)" in fault.text


def test_a_record_is_left_as_it_was():
    own = choices(1)
    record = record_of(own)
    before = replace(record)
    list(row_faults("r", record, own))
    assert record == before
