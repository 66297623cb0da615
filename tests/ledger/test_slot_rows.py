"""Slots and their tags: only a row that is proven is read, and only the present owner writes."""

from __future__ import annotations

import numpy as np
import pytest

from routebook.ledger import RoutedExpertsManager
from routebook.ledger.slot_rows import NO_LEASE, block_of
from routebook.routes.provenance import Origin
from routebook.routes.schema import RouteSchema

SCHEMA = RouteSchema(layer_ids=(0, 1), num_experts=300, top_k=3, num_hidden_layers=2)
SIZE = 4


def make_slots(num_blocks: int = 64) -> RoutedExpertsManager:
    return RoutedExpertsManager(SCHEMA, SIZE, num_blocks)


def numbered_rows(count: int, first: int = 0) -> np.ndarray:
    rows = np.arange(first, first + count, dtype=np.uint16)
    return np.broadcast_to(rows[:, None, None], SCHEMA.shape(count)).copy()


def store(slots: RoutedExpertsManager, leases: np.ndarray, ids: np.ndarray, start: int = 0) -> None:
    """Write rows at positions `start, ...` of a request whose blocks are `leases`."""
    positions = np.arange(start, start + len(ids))
    leases_T = leases[positions // SIZE]
    at = block_of(leases_T) * SIZE + positions % SIZE
    slots.store_batch(at, leases_T, positions, ids, origin_T=int(Origin.DECODE), weight_version=7)


@pytest.mark.parametrize("order", ["ascending", "descending", "scattered"])
def test_rows_come_back_in_the_order_of_the_block_table(order: str) -> None:
    slots = make_slots()
    blocks = np.arange(64)
    if order != "ascending":
        blocks = blocks[::-1] if order == "descending" else np.random.default_rng(0).permutation(64)
    leases = slots.hand_out(blocks)
    store(slots, leases, numbered_rows(250))
    ids, origin, version = slots.get(leases, 0)
    assert (ids[:250] == numbered_rows(250)).all()
    assert (version[:250] == 7).all()
    assert origin.tolist() == [Origin.DECODE] * 250 + [Origin.ABSENT] * 6
    slots.check()


def test_a_lease_never_comes_again() -> None:
    slots, seen = make_slots(3), set()
    for _ in range(50):
        leases = slots.hand_out(np.array([2, 0])).tolist()
        assert [block_of(lease) for lease in leases] == [2, 0]
        assert not seen & set(leases)
        seen |= set(leases)


def test_the_next_owner_neither_sees_nor_suffers_the_last_one() -> None:
    slots = make_slots()
    old = slots.hand_out(np.array([5, 6]))
    store(slots, old, numbered_rows(8))
    new = slots.hand_out(np.array([6, 5]))
    assert not slots.get(new, 0)[1].any()
    assert slots.get(old, 0)[1].all(), "nothing was written since"
    store(slots, new, numbered_rows(3, 100))
    store(slots, old, numbered_rows(8, 50))
    ids, origin, _ = slots.get(new, 0)
    assert origin.tolist() == [Origin.DECODE] * 3 + [0] * 5
    assert (ids[:3] == numbered_rows(3, 100)).all()
    ids, origin, _ = slots.get(old, 0)
    assert origin.tolist() == [Origin.DECODE] * 4 + [0] * 3 + [Origin.DECODE]
    assert (ids[:4] == numbered_rows(4)).all()
    slots.check()


def test_a_row_that_is_there_stays() -> None:
    slots = make_slots()
    leases = slots.hand_out(np.array([1, 3]))
    store(slots, leases, numbered_rows(3, 20), start=2)
    store(slots, leases, numbered_rows(8))
    assert slots.get(leases, 0)[0][:, 0, 0].tolist() == [0, 1, 20, 21, 22, 5, 6, 7]


def test_rows_of_another_position_are_absent() -> None:
    slots = make_slots()
    leases = slots.hand_out(np.array([1, 3, 2]))
    store(slots, leases, numbered_rows(12))
    assert slots.get(leases[1:], 1)[1].all()
    assert not slots.get(leases[1:], 0)[1].any()
    assert slots.get(leases[[0, 2, 1]], 0)[1].tolist() == [Origin.DECODE] * 4 + [0] * 8


def test_no_lease_reads_as_absent_beside_any_block() -> None:
    slots = make_slots(2)
    leases = slots.hand_out(np.array([0, 1]))
    store(slots, leases, numbered_rows(8))
    for missing in ([NO_LEASE, *leases], [*leases, NO_LEASE], [NO_LEASE] * 40, []):
        asked = np.array(missing, np.int64)
        first = 0 if len(missing) != 3 or missing[0] != NO_LEASE else -1
        ids, origin, _ = slots.get(asked, first)
        present = np.repeat(asked != NO_LEASE, SIZE)
        assert ((origin != Origin.ABSENT) == present).all()
        assert (ids[present] == numbered_rows(8)[: present.sum()]).all()
    assert not slots.holds(np.array([NO_LEASE, leases[0] + (1 << 32)])).any()


def test_a_block_is_complete_when_its_owner_has_written_every_slot() -> None:
    slots = make_slots()
    leases = slots.hand_out(np.array([1, 3]))
    store(slots, leases, numbered_rows(7))
    assert slots.complete(np.append(leases, NO_LEASE)).tolist() == [True, False, False]
    assert not slots.complete(slots.hand_out(np.array([1]))).any()
    # Tags of slots that nobody wrote equal no lease by accident.
    assert not slots.complete(np.array([NO_LEASE])).any()
