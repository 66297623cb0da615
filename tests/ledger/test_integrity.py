"""`check_integrity` of a RequestLedger finds each kind of damage, and options are checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from routebook.errors import ConfigError, IntegrityError
from routebook.ledger import LedgerConfig, ReleaseReason, RequestLedger
from routebook.ledger.conformance.pair import TAG_SCHEMA, LedgerPair, PlannedStep


def busy_ledger() -> RequestLedger:
    """Two requests share a block, and one that is gone owes a published block two rows."""
    ledger = RequestLedger(TAG_SCHEMA, 4)
    pair = LedgerPair(ledger)
    for request_id in ("a", "gone"):
        pair.begin(request_id, 9)
        pair.publish(request_id, 0, request_id.encode())
    pair.step(("a", 0, 9), ("gone", 0, 2))
    pair.begin("b", 9)
    pair.share("b", [b"a"])
    pair.release("gone", ReleaseReason.ABORTED)
    ledger.check_integrity()
    return ledger


def lose_a_published_hash(ledger: RequestLedger) -> None:
    del ledger._published[b"a"]


def lose_a_shared_chunk(ledger: RequestLedger) -> None:
    ledger._table.shared_NM[ledger._table.row_of["b"], 0] = -1


def own_a_free_chunk(ledger: RequestLedger) -> None:
    ledger._table.own_NM[ledger._table.row_of["b"], 2] = ledger._pool.free.check(10**9)[0]


def own_a_chunk_that_is_not_there(ledger: RequestLedger) -> None:
    ledger._table.own_NM[ledger._table.row_of["b"], 2] = ledger._pool.num_chunks


def two_requests_in_one_row(ledger: RequestLedger) -> None:
    ledger._table.row_of["b"] = ledger._table.row_of["a"]


def chunks_of_nobody(ledger: RequestLedger) -> None:
    ledger._table.shared_NM[ledger._table.unused[0], 5] = 3


def layers_of_nobody(ledger: RequestLedger) -> None:
    ledger._table.layers[ledger._table.unused[0]] = {}


def wait_for_a_free_chunk(ledger: RequestLedger) -> None:
    ledger._late.add("gone", 9, 0, 1, ledger._pool.free.check(10**9)[0])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_published_hash, "has 2 owners and a count of 3"),
        (lose_a_shared_chunk, "has 2 owners and a count of 3"),
        (own_a_free_chunk, "has 1 owners and a count of 0"),
        (own_a_chunk_that_is_not_there, "does not exist"),
        (two_requests_in_one_row, "not each used once"),
        (chunks_of_nobody, "belongs to no request and holds something"),
        (layers_of_nobody, "belongs to no request and holds something"),
        (wait_for_a_free_chunk, "waits for rows and belongs to nobody"),
    ],
)
def test_damage_is_found(damage: Callable[[RequestLedger], None], message: str) -> None:
    ledger = busy_ledger()
    damage(ledger)
    with pytest.raises(IntegrityError, match=message):
        ledger.check_integrity()


def test_rows_owed_are_forgotten_once_they_came_or_nobody_wants_them() -> None:
    ledger = busy_ledger()
    assert len(ledger._late) == 1
    ledger.withdraw([b"gone"])
    assert len(ledger._late) == 0
    ledger = busy_ledger()
    late = PlannedStep((("gone", 2, 2),), runs=(0,), version=0)
    ledger.store_batch(LedgerPair(ledger).run_model(late))
    assert len(ledger._late) == 0


def test_the_initial_size_is_the_one_asked_for() -> None:
    small, large = (
        RequestLedger(TAG_SCHEMA, 16, LedgerConfig(initial_rows=rows)).usage().capacity_nbytes
        for rows in (17, 17 * 16)
    )
    per_row = TAG_SCHEMA.row_nbytes + 1 + 4
    assert (small, large) == (2 * (16 * per_row + 4), 17 * (16 * per_row + 4))


def test_a_block_whose_later_rows_are_of_no_use_is_a_plain_one_again() -> None:
    ledger = RequestLedger(TAG_SCHEMA, 4)
    pair = LedgerPair(ledger)
    pair.begin("a", 8)
    pair.step(("a", 0, 6))
    pair.release("a", ReleaseReason.PREEMPTED)
    pair.step(("a", 0, 6), version=1)
    row = ledger._table.row("a")
    assert sorted(ledger._table.layers[row]) == [0, 1]
    pair.release("a", ReleaseReason.PREEMPTED)
    assert sorted(ledger._table.layers[row]) == [1], "block 1 has no run with all of its rows"
    pair.compare(9)


def test_requests_that_wait_take_no_room_in_the_tables() -> None:
    ledger = RequestLedger(TAG_SCHEMA, 4)
    pair = LedgerPair(ledger)
    for i in range(1000):
        pair.begin(f"r{i}", 9)
    rows = len(ledger._table.run_N)
    assert ledger.usage().requests == 1000
    assert not pair.compare_range("r7", 0, 9).origin_T.any()
    pair.release("r5", ReleaseReason.ABORTED)
    assert rows == len(ledger._table.run_N) < 100
    late = pair.run_model(pair.plan(("r3", 0, 9)))
    fresh = RequestLedger(TAG_SCHEMA, 4)
    fresh.begin("r3", 9)
    fresh.store_batch(late)
    assert fresh.read("r3", 0, 9).origin_T.all(), "a step is the first that is heard of it"
    pair.compare(10)


def test_the_growth_factor_decides_the_size_after_growth() -> None:
    sizes = []
    for factor in (1.5, 3.0):
        config = LedgerConfig(initial_rows=10, growth_factor=factor)
        ledger = RequestLedger(TAG_SCHEMA, 1, config)
        before = ledger.usage().capacity_nbytes
        pair = LedgerPair(ledger)
        pair.begin("a", 1)
        pair.step(("a", 0, 11))
        sizes.append(ledger.usage().capacity_nbytes / before)
    assert np.allclose(sizes, (2.1, 3.0))


@pytest.mark.parametrize("options", [{"initial_rows": 0}, {"growth_factor": 1.0}])
def test_options_that_cannot_work_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        LedgerConfig(**options)  # type: ignore[arg-type]


def test_a_block_has_a_token() -> None:
    with pytest.raises(ConfigError, match="block_size=0"):
        RequestLedger(TAG_SCHEMA, 0)


def test_a_declined_recomputation_is_not_published_later() -> None:
    ledger = RequestLedger(TAG_SCHEMA, 4)
    pair = LedgerPair(ledger)
    for request_id in ("first", "a"):
        pair.begin(request_id, 5)
        pair.step((request_id, 0, 5))
    pair.publish("first", 0, b"h")
    pair.release("a", ReleaseReason.PREEMPTED)
    pair.step(("a", 0, 2))
    pair.publish("a", 0, b"h")
    pair.step(("a", 2, 3))
    ledger.withdraw([b"h"])
    ledger.publish("a", 0, b"h")
    assert ledger.available([b"h"]) == 0
    ledger.check_integrity()


def test_what_nobody_will_read_takes_no_chunk() -> None:
    ledger = RequestLedger(TAG_SCHEMA, 4)
    pair = LedgerPair(ledger)
    for request_id in ("a", "b"):
        pair.begin(request_id, 4)
        pair.step((request_id, 0, 4))
    pair.publish("a", 0, b"h")
    pair.release("b", ReleaseReason.PREEMPTED)
    pair.share("b", [b"h"])
    assert ledger.usage().request_chunks == 2, "its own rows are complete"
    pair.begin("c", 4)
    pair.share("c", [b"h"])
    pair.step(("c", 3, 1), ("b", 3, 1))
    assert ledger.usage().request_chunks == 3, "a token computed again in a block that was taken"
    pair.publish("c", 1, b"own")
    pair.release("c", ReleaseReason.PREEMPTED)
    pair.share("c", [b"h", b"own"])
    assert ledger.usage().request_chunks == 4, "its own block, whose rows are on the way"
    pair.compare(9)
