"""Reset, idleness, and what is refused."""

# The names of the tests are their sentences.
# ruff: noqa: D102

from __future__ import annotations

from dataclasses import replace

import numpy as np

from routebook.ledger.base import ReleaseReason
from routebook.ledger.conformance.case import H0, H1, A, B, C, ConformanceCase, refuses
from routebook.ledger.conformance.pair import TAG_SCHEMA


class LimitsConformance(ConformanceCase):
    """Reset, idleness, and what is refused."""

    def test_reset_forgets_hashes_and_keeps_rows(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 9)
        pair.publish(A, 0, H0)
        pair.step((A, 0, 5))
        pair.begin(B, 5)
        pair.share(B, [H0])
        pair.publish(A, 1, H1)
        pair.reset()
        assert pair.ledger.available([H0]) == pair.ledger.available([H1]) == 0
        pair.step((A, 5, 4), (B, 4, 1), version=1)
        pair.compare(10)
        assert pair.ledger.read(B, 0, 4).origin_T.all()

    def test_idle_means_empty(self) -> None:
        pair = self.make_pair()
        for request_id in (A, B, C):
            pair.begin(request_id, 9)
            pair.publish(request_id, 0, H0)
            pair.step((request_id, 0, 9))
            pair.release(request_id, ReleaseReason.PREEMPTED)
            pair.step((request_id, 0, 9))
        used = pair.ledger.usage()
        assert used.requests == 3
        assert used.request_chunks >= 9
        assert used.capacity_nbytes >= 27 * TAG_SCHEMA.row_nbytes
        for request_id, reason in (
            (A, ReleaseReason.FINISHED),
            (B, ReleaseReason.ABORTED),
            (C, ReleaseReason.ABORTED),
        ):
            pair.release(request_id, reason)
        idle = pair.ledger.usage()
        assert (idle.requests, idle.request_chunks, idle.published) == (0, 0, 1)
        pair.reset()
        assert pair.ledger.usage().published == 0
        pair.ledger.check_integrity()

    def test_work_that_ends_is_not_kept(self) -> None:
        pair = self.make_pair()
        sizes = []
        for i in range(60):
            pair.begin(f"r{i}", 40)
            pair.publish(f"r{i}", 0, b"%d" % i)
            pair.step((f"r{i}", 0, 400))
            pair.release(f"r{i}", ReleaseReason.PREEMPTED)
            pair.step((f"r{i}", 0, 400))
            pair.release(f"r{i}", ReleaseReason.FINISHED)
            pair.withdraw(b"%d" % i)
            sizes.append(pair.ledger.usage().capacity_nbytes)
        assert sizes[-1] == sizes[1], "the ledger grows under a load that does not"

    def test_an_ended_request_is_unknown(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 4)
        pair.step((A, 0, 4))
        pair.release(A, ReleaseReason.FINISHED)
        ledger = pair.ledger
        refuses(lambda: ledger.read(A, 0, 1), repr(A))
        refuses(lambda: ledger.share(A, [H0]), repr(A))
        refuses(lambda: ledger.publish(A, 0, H0), repr(A))
        refuses(lambda: ledger.assign(A, [1]), repr(A))
        refuses(lambda: ledger.release(A, ReleaseReason.FINISHED), repr(A))
        pair.begin(A, 4)
        assert not pair.compare_range(A, 0, 4).origin_T.any()

    def test_calls_against_the_contract_are_refused(self) -> None:
        pair = self.make_pair()
        ledger = pair.ledger
        pair.begin(A, 9)
        pair.step((A, 0, 4))
        refuses(lambda: ledger.begin(A, 1), repr(A))
        pair.begin(C, 1)
        refuses(lambda: ledger.begin(C, 1), repr(C))
        refuses(lambda: ledger.begin(B, -1), "-1")
        refuses(lambda: ledger.read(A, 3, 2), "3", "2")
        refuses(lambda: ledger.read(A, -1, 2), "-1")
        refuses(lambda: ledger.publish(A, -1, H0), "-1")
        pair.begin(B, 9)
        pair.share(B, [H0])
        refuses(lambda: ledger.publish(B, 0, H0), "prefix cache")
        pair.compare(9)

    def test_a_step_that_does_not_fit_writes_nothing(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 9)
        pair.begin(B, 9)
        good = pair.run_model(pair.plan((A, 0, 3), (B, 0, 2)))
        ids = good.ids_TLK
        narrow = ids.astype(np.uint8)
        refuses(lambda: pair.ledger.store_batch(replace(good, ids_TLK=narrow)), "uint8", "uint16")
        bad = [
            replace(good, ids_TLK=ids[:-1]),
            replace(good, ids_TLK=ids[:, :2]),
            replace(good, ids_TLK=np.asfortranarray(ids)),
            replace(good, request_ids=[A]),
            replace(good, request_ids=[A, A]),
            replace(good, counts_R=np.array([6, -1])),
            replace(good, starts_R=np.array([-1, 0])),
            replace(good, starts_R=np.array([0, 0], np.int32)),
            replace(good, weight_version=-1),
            replace(good, weight_version=2**32),
            replace(good, runs_R=np.array([0, 1])),
            replace(good, runs_R=np.array([0])),
        ]
        for step in bad:
            refuses(lambda step=step: pair.ledger.store_batch(step))  # type: ignore[misc]
        assert not pair.compare_range(A, 0, 9).origin_T.any()
        assert not pair.compare_range(B, 0, 9).origin_T.any()
