"""What only a ledger by KV slot refuses, and each kind of damage that its `check_integrity` finds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from routebook.errors import ConfigError, IntegrityError, LedgerError
from routebook.ledger import KVSlotConfig, KVSlotLedger, ReleaseReason
from routebook.ledger.conformance.pair import TAG_SCHEMA, LedgerPair, PlannedStep
from routebook.ledger.snapshot_cache import PendingBlock

NUM_BLOCKS = 16


def make_pair(num_blocks: int = NUM_BLOCKS) -> tuple[KVSlotLedger, LedgerPair]:
    ledger = KVSlotLedger(TAG_SCHEMA, 4, num_blocks)
    return ledger, LedgerPair(ledger, num_blocks)


def busy_ledger() -> KVSlotLedger:
    """`b` shares a block of `a`; `waits` is preempted with a step on the way; `gone` owes a published block."""
    ledger, pair = make_pair()
    for name in ("a", "gone", "waits"):
        pair.begin(name, 9)
    pair.publish("a", 0, b"a")
    pair.publish("gone", 0, b"gone")
    pair.step(("a", 0, 9), ("gone", 0, 2), ("waits", 0, 6))
    pair.begin("b", 9)
    pair.share("b", [b"a"])
    pair.plan(("waits", 6, 1))
    pair.release("waits", ReleaseReason.PREEMPTED)
    pair.release("gone", ReleaseReason.ABORTED)
    ledger.check_integrity()
    return ledger


def hand_out_a_used_block(ledger: KVSlotLedger) -> None:
    ledger._slots.hand_out(ledger._tables.lease_NM[ledger._tables.row_of["a"], 1:2] & 0xFF)


def hand_out_a_published_block(ledger: KVSlotLedger) -> None:
    ledger._slots.hand_out(np.array([ledger._published[b"gone"] & 0xFF]))


def two_writers_of_a_block(ledger: KVSlotLedger) -> None:
    tables, a, b = ledger._tables, ledger._tables.row_of["a"], ledger._tables.row_of["b"]
    tables.lease_NM[b, 1], tables.assigned_N[b] = tables.lease_NM[a, 1], 2


def two_requests_in_one_row(ledger: KVSlotLedger) -> None:
    ledger._tables.row_of["b"] = ledger._tables.row_of["a"]


def blocks_of_nobody(ledger: KVSlotLedger) -> None:
    ledger._tables.lease_NM[ledger._tables.unused[0], 3] = 5


def claim_of_nobody(ledger: KVSlotLedger) -> None:
    ledger._late.add("gone", 9, 0, 1, 7 << 32)


def tag_of_another_block(ledger: KVSlotLedger) -> None:
    ledger._slots._lease_PB.reshape(-1)[0] = ledger._slots.lease_P[3]


def tag_of_a_lease_to_come(ledger: KVSlotLedger) -> None:
    ledger._slots._lease_PB.reshape(-1)[0] = ledger._slots.lease_P[0] + (1 << 32)


def tag_of_another_offset(ledger: KVSlotLedger) -> None:
    slot = np.flatnonzero(ledger._slots._lease_PB.reshape(-1) >= 0)[0]
    ledger._slots._position_PB.reshape(-1)[slot] += 1


def tag_without_an_origin(ledger: KVSlotLedger) -> None:
    slot = np.flatnonzero(ledger._slots._lease_PB.reshape(-1) >= 0)[0]
    ledger._slots._origin_PB.reshape(-1)[slot] = 0


def snapshot_of_nobody(ledger: KVSlotLedger) -> None:
    ledger._cache.entries["gone"] = ledger._cache.entries["waits"]


def forgotten_note(ledger: KVSlotLedger) -> None:
    ledger._cache.entries["waits"].pending.clear()


def note_without_an_index(ledger: KVSlotLedger) -> None:
    ledger._cache.entries["waits"].pending[5] = PendingBlock(0, own=True, run=0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (hand_out_a_used_block, "of 'a' was handed to somebody else"),
        (hand_out_a_published_block, "hash 676f6e65 names a block that was handed out again"),
        (two_writers_of_a_block, "belongs to 'a' and 'b'"),
        (two_requests_in_one_row, "not each used once"),
        (blocks_of_nobody, "belongs to no request and holds something"),
        (claim_of_nobody, "waits for rows and belongs to nobody"),
        (tag_of_another_block, "slot 0 is tagged"),
        (tag_of_a_lease_to_come, "slot 0 is tagged"),
        (tag_of_another_offset, "no write leaves that there"),
        (tag_without_an_origin, "origin 0"),
        (snapshot_of_nobody, r"snapshots of \['gone'\]"),
        (forgotten_note, "pending blocks"),
        (note_without_an_index, "pending blocks"),
    ],
)
def test_damage_is_found(damage: Callable[[KVSlotLedger], None], message: str) -> None:
    ledger = busy_ledger()
    damage(ledger)
    with pytest.raises(IntegrityError, match=message):
        ledger.check_integrity()


@pytest.mark.parametrize(
    ("block_ids", "message"),
    [([3, 4, 3], "occurs twice"), ([0, NUM_BLOCKS], "pool of 16"), ([-1], "pool of 16")],
)
def test_blocks_that_cannot_be_are_refused(block_ids: list[int], message: str) -> None:
    ledger, pair = make_pair()
    pair.begin("a", 1)
    with pytest.raises(LedgerError, match=message):
        ledger.assign("a", block_ids)
    pair.step(("a", 0, 9))
    pair.compare(10)


def test_shared_blocks_come_first_and_in_their_order() -> None:
    ledger, pair = make_pair()
    pair.begin("a", 9)
    pair.publish("a", 0, b"0")
    pair.publish("a", 1, b"1")
    pair.step(("a", 0, 9))
    first, second = pair.pool.tables["a"][:2]
    ledger.begin("b", 9)
    ledger.share("b", [b"0", b"1"])
    for wrong in ([second, first], [first, 9], [9]):
        with pytest.raises(
            LedgerError, match=f"is not block {first if wrong[0] != first else second}"
        ):
            ledger.assign("b", wrong)
    ledger.assign("b", [first])
    ledger.assign("b", [second, 9])
    with pytest.raises(LedgerError, match="share before assign"):
        ledger.share("b", [b"0"])
    assert ledger.read("b", 0, 8).origin_T.all()
    ledger.check_integrity()


def test_a_block_that_was_never_assigned_is_neither_stored_nor_published() -> None:
    ledger, pair = make_pair()
    pair.begin("a", 2)
    pair.begin("b", 2)
    pair.step(("a", 0, 4), ("b", 0, 3))
    with pytest.raises(LedgerError, match="block 1 of 'a' is not in its table of 1 blocks"):
        ledger.publish("a", 1, b"h")
    for count in (1, 2):
        step = pair.plan(("b", 3, 1), ("a", 4, count))
        fresh = KVSlotLedger(TAG_SCHEMA, 4, NUM_BLOCKS)
        for name in ("a", "b"):
            fresh.begin(name, 2)
            fresh.assign(name, [3 if name == "a" else 5])
        with pytest.raises(LedgerError, match="block 1 of 'a' is not in its table"):
            fresh.store_batch(pair.run_model(step, tell_runs=False))
        assert not fresh.read("b", 0, 4).origin_T.any()


def test_a_decode_without_a_block_is_refused_at_once() -> None:
    ledger, pair = make_pair()
    for name in ("a", "b"):
        ledger.begin(name, 1)
    ledger.assign("a", [3, 4])
    ledger.assign("b", [5])
    pair.oracle.begin("a", 1)
    pair.oracle.begin("b", 1)
    for t in range(6):
        step = PlannedStep((("a", t, 1), ("b", t, 1)), (0, 0), 0)
        if t == 4:
            with pytest.raises(LedgerError, match="block 1 of 'b' is not in its table of 1 blocks"):
                pair.store(step)
            ledger.assign("b", [6])
        pair.store(step)
    pair.compare_range("a", 0, 8)
    pair.compare_range("b", 0, 8)


def test_a_published_block_that_is_handed_out_again_is_not_shared() -> None:
    """Whoever forgets to withdraw gets absent rows, never another's."""
    ledger, pair = make_pair()
    pair.begin("a", 5)
    pair.publish("a", 0, b"h")
    pair.step(("a", 0, 5))
    block = pair.pool.tables["a"][0]
    pair.release("a", ReleaseReason.FINISHED)
    ledger.begin("b", 4)
    ledger.assign("b", [block])
    assert ledger.available([b"h"]) == 0
    ledger.publish("b", 0, b"other")
    ledger.begin("c", 5)
    ledger.share("c", [b"h"])
    ledger.assign("c", [block])
    assert not ledger.read("c", 0, 4).origin_T.any()
    ledger.begin("d", 5)
    assert ledger.available([b"h"]) == 0
    ledger.publish("b", 0, b"h")
    assert ledger.available([b"h"]) == 1


def test_blocks_taken_from_under_a_request_read_as_absent() -> None:
    """The KV pool errs, or the answer is read too late: rows of the new owner do not show."""
    ledger, pair = make_pair()
    pair.begin("a", 8)
    pair.step(("a", 0, 8))
    kept = ledger.read("a", 0, 8)
    pair.begin("thief", 8)
    ledger.assign("thief", pair.pool.tables["a"])
    assert (ledger.read("a", 0, 8).ids_TLK == kept.ids_TLK).all()
    rows = pair.run_model(pair.plan(("a", 8, 1)))
    steal = pair.run_model(pair.plan(("a", 0, 3)))
    ledger.store_batch(rows)
    pair.pool.tables["thief"] = list(pair.pool.tables["a"][:2])
    ledger.store_batch(pair.run_model(pair.plan(("thief", 0, 3)), tell_runs=True))
    ledger.store_batch(steal)
    assert ledger.read("a", 0, 9).origin_T.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 2]
    assert (ledger.read("thief", 0, 3).ids_TLK[:, 0, 0] == 1).all()
    assert not ledger.read("thief", 3, 8).origin_T.any()


def test_a_long_step_does_not_reach_blocks_that_have_a_new_owner() -> None:
    ledger = KVSlotLedger(TAG_SCHEMA, 4, 64)
    pair = LedgerPair(ledger, 64)
    pair.begin("a", 200)
    late = pair.run_model(pair.plan(("a", 0, 200)))
    ledger.begin("thief", 200)
    ledger.assign("thief", pair.pool.tables["a"])
    ledger.store_batch(late)
    assert not ledger.read("thief", 0, 200).origin_T.any()
    assert not ledger.read("a", 0, 200).origin_T.any()


def test_nothing_is_kept_for_what_nobody_can_read() -> None:
    ledger = busy_ledger()
    cache, late = ledger._cache, ledger._late
    assert set(cache.entries) == {"waits"}
    assert len(late) == 2, "the step of 'waits', and what 'gone' owes to its published block"
    ledger.release("waits", ReleaseReason.ABORTED)
    assert not cache.entries
    assert not cache.waiting
    assert len(late) == 1
    ledger.begin("new", 4)
    ledger.withdraw([b"gone"])
    ledger.assign("new", [ledger._late._owner and next(iter(late)) & 0xFF])
    assert not len(late)
    ledger.check_integrity()


def test_a_request_that_goes_on_ends_what_its_last_run_owed() -> None:
    ledger, pair = make_pair()
    pair.begin("a", 6)
    pair.step(("a", 0, 6))
    pair.release("a", ReleaseReason.PREEMPTED)
    assert ledger._cache.waiting
    pair.step(("a", 0, 7))
    assert not ledger._cache.waiting
    assert not len(ledger._late)
    pair.compare(8)


def test_a_decode_of_the_next_run_ends_what_the_last_one_owed() -> None:
    ledger, pair = make_pair()
    pair.begin("a", 1)
    pair.publish("a", 0, b"h")
    pair.step(("a", 0, 5))
    pair.release("a", ReleaseReason.PREEMPTED)
    pair.share("a", [b"h"])
    assert ledger._cache.waiting
    pair.step(("a", 4, 1))
    assert not ledger._cache.waiting
    assert not len(ledger._late)


def test_a_sharer_that_goes_claims_nothing() -> None:
    ledger, pair = make_pair()
    pair.begin("a", 4)
    pair.publish("a", 0, b"h")
    late = pair.plan(("a", 0, 4))
    pair.begin("b", 5)
    pair.share("b", [b"h"])
    for name in ("a", "b"):
        pair.release(name, ReleaseReason.ABORTED)
    assert list(ledger._late) == [ledger._published[b"h"]]
    pair.store(late)
    assert not len(ledger._late)
    assert not ledger._late.involves(["a", "b"])


def test_a_block_that_was_named_once_is_not_so_for_its_next_owner() -> None:
    ledger, pair = make_pair(1)
    pair.begin("a", 4)
    pair.publish("a", 0, b"h")
    pair.step(("a", 0, 4))
    pair.release("a", ReleaseReason.FINISHED)
    pair.begin("b", 4)
    pair.plan(("b", 0, 4))
    pair.release("b", ReleaseReason.ABORTED)
    assert not len(ledger._late)


def test_what_lies_in_the_slots_is_not_copied() -> None:
    ledger, pair = make_pair()
    pair.begin("a", 8)
    pair.step(("a", 0, 9))
    pair.release("a", ReleaseReason.FINISHED)
    assert not ledger._cache.entries
    before = ledger.usage().capacity_nbytes
    per_slot = TAG_SCHEMA.row_nbytes + 8 + 4 + 4 + 1
    assert before == NUM_BLOCKS * (4 * per_slot + 8)


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "name"), [(0, 1, "block_size"), (1, 0, "num_blocks")]
)
def test_a_pool_has_a_slot(block_size: int, num_blocks: int, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0"):
        KVSlotLedger(TAG_SCHEMA, block_size, num_blocks)


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="initial_requests=0"):
        KVSlotConfig(initial_requests=0)


def test_the_initial_requests_are_those_asked_for() -> None:
    ledger = KVSlotLedger(TAG_SCHEMA, 4, 8, KVSlotConfig(initial_requests=3))
    assert len(ledger._tables.unused) == 3
