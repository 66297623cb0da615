"""Blocks that several requests share."""

# The names of the tests are their sentences.
# ruff: noqa: D102

from __future__ import annotations

from routebook.ledger.base import ReleaseReason
from routebook.ledger.conformance.case import H0, H1, H2, A, B, C, ConformanceCase, D
from routebook.routes.provenance import Origin, Provenance


class SharingConformance(ConformanceCase):
    """Blocks that several requests share."""

    def test_a_shared_block_has_the_rows_of_who_computed_it(self) -> None:
        for block_size in (1, 4, 16):
            pair = self.make_pair(block_size)
            pair.begin(A, 2 * block_size)
            pair.publish(A, 0, H0)
            pair.publish(A, 1, H1)
            pair.step((A, 0, 2 * block_size), version=5)
            pair.begin(B, 2 * block_size + 1)
            assert pair.ledger.available([H0, H1, H2]) == 2
            pair.share(B, [H0, H1])
            pair.step((B, 2 * block_size, 1), version=6)
            pair.compare(3 * block_size)
            assert pair.ledger.read(B, 0, 3 * block_size).provenance == (
                Provenance(0, 2 * block_size, 5, Origin.PREFIX_CACHE),
                Provenance(2 * block_size, 2 * block_size + 1, 6, Origin.PREFILL),
            )

    def test_a_block_is_shared_before_its_rows_arrive(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 5)
        pair.step((A, 0, 3))
        pair.begin(B, 5)
        pair.publish(A, 0, H0)
        pair.share(B, [H0])
        step = pair.plan((A, 3, 2), (B, 4, 1))
        assert pair.compare_range(B, 0, 4).origin_T.tolist() == [Origin.PREFIX_CACHE] * 3 + [0]
        pair.store(step)
        pair.compare(8)
        assert pair.ledger.read(B, 0, 5).origin_T.all()

    def test_shared_rows_outlive_their_maker_and_their_hash(self) -> None:
        for reason in (ReleaseReason.FINISHED, ReleaseReason.ABORTED):
            pair = self.make_pair()
            pair.begin(A, 4)
            pair.publish(A, 0, H0)
            pair.step((A, 0, 4))
            pair.release(A, reason)
            pair.begin(B, 5)
            pair.share(B, [H0])
            pair.withdraw(H0)
            assert pair.ledger.available([H0]) == 0
            pair.begin(C, 40)
            pair.step((C, 0, 40))
            pair.compare(44)
            assert pair.ledger.read(B, 0, 4).origin_T.all()

    def test_rows_reach_a_published_block_after_their_request_is_gone(self) -> None:
        for told in (True, False):
            pair = self.make_pair()
            pair.begin(A, 6)
            pair.step((A, 0, 2))
            pair.publish(A, 0, H0)
            step = pair.plan((A, 2, 4))
            pair.release(A, ReleaseReason.ABORTED)
            pair.begin(B, 5)
            pair.share(B, [H0])
            pair.store(step, tell_runs=told)
            pair.compare(8)
            assert pair.ledger.read(B, 0, 4).origin_T.all()

    def test_late_rows_of_an_evicted_block_hurt_nobody(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 8)
        pair.publish(A, 0, H0)
        step = pair.plan((A, 0, 8))
        pair.release(A, ReleaseReason.ABORTED)
        pair.withdraw(H0)
        for i in range(64):
            pair.begin(f"new {i}", 8)
            pair.step((f"new {i}", 1, 1))
        pair.store(step)
        pair.compare(9)

    def test_late_rows_do_not_pass_for_those_of_a_new_request_of_that_id(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 4)
        pair.publish(A, 0, H0)
        pair.release(A, ReleaseReason.ABORTED)
        pair.ledger.begin(A, 4)
        rows = pair.run_model(pair.plan((A, 0, 4)))
        pair.ledger.store_batch(rows)
        pair.ledger.begin(B, 5)
        pair.ledger.share(B, [H0])
        assert not pair.ledger.read(B, 0, 4).origin_T.any()
        assert (pair.ledger.read(A, 0, 4).ids_TLK == rows.ids_TLK).all()

    def test_late_rows_of_a_second_life_do_not_reach_the_block_of_the_first(self) -> None:
        pair = self.make_pair()
        for _ in range(2):
            pair.begin(A, 4)
            if pair.ledger.available([H0]) == 0:
                pair.publish(A, 0, H0)
            step = pair.plan((A, 0, 4))
            pair.release(A, ReleaseReason.ABORTED)
        rows = pair.run_model(step)
        pair.begin(B, 5)
        pair.share(B, [H0])
        pair.ledger.store_batch(rows)
        assert not pair.ledger.read(B, 0, 4).origin_T.any()

    def test_rows_of_a_sharer_never_reach_the_block_it_shares(self) -> None:
        for prompt in (1, 8):
            pair = self.make_pair()
            pair.begin(A, 8)
            pair.step((A, 0, 3))
            pair.publish(A, 0, H0)
            pair.begin(B, prompt)
            pair.share(B, [H0])
            pair.step((B, 3, 1))
            pair.begin(C, 5)
            pair.share(C, [H0])
            pair.compare(5)
            assert pair.ledger.read(C, 0, 4).origin_T.tolist() == [Origin.PREFIX_CACHE] * 3 + [0]

    def test_an_unknown_hash_leaves_absent_rows(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 8)
        pair.publish(A, 1, H1)
        pair.step((A, 0, 8))
        pair.begin(B, 13)
        assert pair.ledger.available([H0, H1]) == 0
        pair.share(B, [H0, H1, H2])
        pair.step((B, 12, 1))
        rows = pair.compare_range(B, 0, 13)
        assert rows.origin_T.nonzero()[0].tolist() == [4, 5, 6, 7, 12]

    def test_the_first_publisher_stays(self) -> None:
        pair = self.make_pair()
        for request_id in (A, B):
            pair.begin(request_id, 5)
            pair.publish(request_id, 0, H0)
        pair.step((B, 0, 4), (A, 0, 4))
        pair.begin(C, 5)
        pair.share(C, [H0])
        pair.compare(6)
        first = pair.ledger.read(A, 0, 4).ids_TLK
        assert (pair.ledger.read(C, 0, 4).ids_TLK == first).all()
        pair.release(A, ReleaseReason.FINISHED)
        pair.publish(B, 0, H0)
        assert (pair.compare_range(C, 0, 4).ids_TLK == first).all()

    def test_a_withdrawn_hash_can_be_published_again(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 5)
        pair.publish(A, 0, H0)
        pair.step((A, 0, 5))
        pair.begin(B, 5)
        pair.share(B, [H0])
        pair.withdraw(H0, H2)
        pair.begin(C, 5)
        pair.publish(C, 0, H0)
        pair.step((C, 0, 5))
        pair.begin(D, 5)
        pair.share(D, [H0])
        pair.compare(6)
        assert (pair.ledger.read(D, 0, 4).ids_TLK == pair.ledger.read(C, 0, 4).ids_TLK).all()
        assert (pair.ledger.read(B, 0, 4).ids_TLK == pair.ledger.read(A, 0, 4).ids_TLK).all()
