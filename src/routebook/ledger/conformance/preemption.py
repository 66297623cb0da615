"""Preempted requests, shared blocks and recomputed ones, together."""

# The names of the tests are their sentences.
# ruff: noqa: D102

from __future__ import annotations

from routebook.ledger.base import ReleaseReason
from routebook.ledger.conformance.case import H0, H1, A, B, C, ConformanceCase
from routebook.routes.provenance import Origin


class PreemptionConformance(ConformanceCase):
    """Preempted requests, shared blocks and recomputed ones, together."""

    def test_a_resumed_request_and_shared_rows(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 9)
        pair.step((A, 0, 6))
        pair.begin(B, 9)
        pair.publish(B, 0, H0)
        pair.publish(B, 1, H1)
        pair.step((B, 0, 9))
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.share(A, [H0, H1])
        pair.step((A, 8, 1))
        rows = pair.compare_range(A, 0, 10)
        prefill, shared = [Origin.PREFILL], [Origin.PREFIX_CACHE]
        earliest = prefill * 6 + shared * 2 + prefill
        assert rows.origin_T.tolist() == [*pair.chosen(earliest, shared * 8 + prefill), 0]

    def test_a_late_row_and_a_row_shared_after_it(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 8)
        pair.begin(B, 9)
        pair.publish(B, 0, H0)
        pair.step((A, 0, 1), (B, 0, 4))
        late = pair.plan((A, 1, 2))
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.share(A, [H0])
        pair.store(late)
        pair.store(pair.plan((A, 4, 1)))
        rows = pair.compare_range(A, 0, 5)
        assert rows.origin_T.tolist() == pair.chosen([1, 1, 1, 3, 1], [3, 3, 3, 3, 1])

    def test_a_late_row_and_a_whole_shared_block(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 8)
        pair.begin(B, 9)
        pair.publish(B, 0, H0)
        pair.step((B, 0, 4))
        late = pair.plan((A, 0, 3))
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.share(A, [H0])
        pair.store(late)
        origin_T = pair.compare_range(A, 0, 4).origin_T
        assert origin_T.tolist() == pair.chosen([1, 1, 1, 3], [3, 3, 3, 3])
        pair.compare(9)

    def test_a_recomputed_block_is_published_as_recomputed(self) -> None:
        for cuts in ([4], [1, 3], [2, 1, 1]):
            pair = self.make_pair()
            pair.begin(A, 3)
            pair.step((A, 0, 3))
            pair.release(A, ReleaseReason.PREEMPTED)
            position = 0
            for count in cuts:
                if position + count == 4:
                    pair.publish(A, 0, H0)
                pair.step((A, position, count), version=1)
                position += count
            pair.begin(B, 5)
            pair.share(B, [H0])
            pair.compare(6)
            version_T = pair.ledger.read(A, 0, 4).version_T
            assert version_T.tolist() == pair.chosen([0, 0, 0, 1], [1] * 4)
            assert pair.ledger.read(B, 0, 4).version_T.tolist() == [1] * 4

    def test_a_block_published_after_its_rows_were_stored(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 4)
        pair.step((A, 0, 4))
        pair.publish(A, 0, H0)
        pair.withdraw(H0)
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.step((A, 0, 4), version=1)
        pair.publish(A, 0, H0)
        pair.publish(A, 0, H0)
        pair.release(A, ReleaseReason.FINISHED)
        pair.begin(B, 5)
        pair.share(B, [H0])
        assert pair.compare_range(B, 0, 4).version_T.tolist() == [1] * 4

    def test_recomputed_twice_with_the_first_recomputation_still_shared(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 4)
        pair.step((A, 0, 4))
        for run, sharer in ((1, B), (2, C)):
            pair.release(A, ReleaseReason.PREEMPTED)
            pair.step((A, 0, 2), version=run)
            pair.publish(A, 0, H0)
            pair.begin(sharer, 5)
            pair.share(sharer, [H0])
            late = pair.plan((A, 2, 2), version=run)
            if run == 1:
                pair.withdraw(H0)
            pair.store(late)
        pair.compare(5)
        assert pair.ledger.read(B, 0, 4).version_T.tolist() == [1] * 4
        assert pair.ledger.read(C, 0, 4).version_T.tolist() == [2] * 4

    def test_late_rows_of_two_recomputations_do_not_mix(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 4)
        pair.step((A, 0, 4))
        late = []
        for run, sharer in ((1, B), (2, C)):
            pair.release(A, ReleaseReason.PREEMPTED)
            pair.publish(A, 0, H0)
            pair.begin(sharer, 5)
            pair.share(sharer, [H0])
            pair.withdraw(H0)
            late.append(pair.plan((A, 0, 4), version=run))
        pair.release(A, ReleaseReason.ABORTED)
        for step in late:
            pair.store(step)
        pair.compare(5)
        assert pair.ledger.read(B, 0, 4).version_T.tolist() == [1] * 4
        assert pair.ledger.read(C, 0, 4).version_T.tolist() == [2] * 4

    def test_a_partial_run_never_reaches_the_published_block(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 8)
        late = pair.plan((A, 0, 3))
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.publish(A, 0, H0)
        pair.begin(B, 5)
        pair.share(B, [H0])
        whole = pair.plan((A, 0, 5), version=1)
        pair.store(late)
        assert not pair.compare_range(B, 0, 4).origin_T.any()
        pair.store(whole)
        pair.compare(6)
        assert pair.ledger.read(B, 0, 4).version_T.tolist() == [1] * 4
        version_T = pair.ledger.read(A, 0, 5).version_T
        assert version_T.tolist() == pair.chosen([0, 0, 0, 1, 1], [1] * 5)

    def test_a_partial_run_never_reaches_a_block_that_is_published_again(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 8)
        late = pair.plan((A, 0, 3))
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.publish(A, 0, H0)
        pair.withdraw(H0)
        whole = pair.plan((A, 0, 5), version=1)
        pair.store(late)
        pair.store(whole)
        pair.publish(A, 0, H0)
        pair.begin(B, 5)
        pair.share(B, [H0])
        pair.compare(6)
        assert pair.ledger.read(B, 0, 4).version_T.tolist() == [1] * 4
        version_T = pair.ledger.read(A, 0, 5).version_T
        assert version_T.tolist() == pair.chosen([0, 0, 0, 1, 1], [1] * 5)

    def test_a_step_that_never_came_leaves_a_published_block_absent(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 8)
        pair.step((A, 0, 2))
        pair.publish(A, 0, H0)
        pair.begin(B, 5)
        pair.share(B, [H0])
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.step((A, 0, 4), version=1)
        pair.compare(6)
        version_T = pair.ledger.read(A, 0, 4).version_T
        assert version_T.tolist() == pair.chosen([0, 0, 1, 1], [1] * 4)
        assert pair.ledger.read(B, 0, 4).origin_T.tolist() == [Origin.PREFIX_CACHE] * 2 + [0] * 2
        pair.withdraw(H0)
        pair.publish(A, 0, H0)
        pair.begin(C, 5)
        pair.share(C, [H0])
        assert pair.compare_range(C, 0, 4).version_T.tolist() == [1] * 4

    def test_a_sharer_recomputes_its_shared_block(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 8)
        pair.publish(A, 0, H0)
        pair.step((A, 0, 8))
        pair.begin(B, 8)
        pair.share(B, [H0])
        pair.step((B, 4, 1))
        pair.withdraw(H0)
        pair.release(B, ReleaseReason.PREEMPTED)
        pair.step((B, 0, 3), version=1)
        pair.publish(B, 0, H0)
        pair.step((B, 3, 4), version=1)
        pair.begin(C, 5)
        pair.share(C, [H0])
        pair.compare(8)
        rows = pair.ledger.read(B, 0, 7)
        assert rows.version_T.tolist() == pair.chosen([0] * 5 + [1] * 2, [1] * 7)
        assert rows.origin_T.tolist() == pair.chosen([3] * 4 + [1] * 3, [6] * 5 + [1] * 2)
        assert pair.ledger.read(C, 0, 4).version_T.tolist() == [1] * 4

    def test_a_sharer_whose_rows_never_came_has_its_own(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 8)
        pair.step((A, 0, 2))
        pair.publish(A, 0, H0)
        pair.begin(B, 8)
        pair.share(B, [H0])
        pair.release(B, ReleaseReason.PREEMPTED)
        pair.step((B, 0, 4), version=1)
        pair.compare(8)
        origin_T = pair.ledger.read(B, 0, 4).origin_T
        assert origin_T.tolist() == pair.chosen([3, 3, 1, 1], [6, 6, 1, 1])
        assert pair.ledger.read(A, 0, 4).origin_T.tolist() == [1, 1, 0, 0]
        pair.withdraw(H0)
        pair.publish(B, 0, H0)
        pair.begin(C, 5)
        pair.share(C, [H0])
        assert pair.compare_range(C, 0, 4).version_T.tolist() == [1] * 4

    def test_a_token_computed_again_inside_a_shared_block(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 4)
        pair.publish(A, 0, H0)
        pair.step((A, 0, 4))
        pair.begin(B, 4)
        pair.share(B, [H0])
        pair.step((B, 3, 1))
        assert pair.compare_range(B, 0, 4).origin_T.tolist() == [Origin.PREFIX_CACHE] * 4
        pair.compare(5)

    def test_a_recomputed_block_whose_hash_is_published_keeps_its_first_rows(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 5)
        pair.publish(A, 0, H0)
        pair.step((A, 0, 5))
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.step((A, 0, 2), version=1)
        pair.publish(A, 0, H0)
        pair.step((A, 2, 3), version=1)
        pair.begin(B, 5)
        pair.share(B, [H0])
        pair.compare(6)
        assert pair.ledger.read(B, 0, 4).version_T.tolist() == [0] * 4

    def test_a_row_shared_earlier_and_a_late_recomputation(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 8)
        pair.publish(A, 0, H0)
        pair.step((A, 0, 4))
        pair.begin(B, 8)
        pair.share(B, [H0])
        pair.release(B, ReleaseReason.PREEMPTED)
        late = [pair.plan((B, 0, 2), version=1), pair.plan((B, 2, 4), version=1)]
        pair.release(B, ReleaseReason.PREEMPTED)
        for step in late:
            pair.store(step)
            pair.compare(8)
        version_T = pair.ledger.read(B, 0, 6).version_T
        assert version_T.tolist() == pair.chosen([0] * 4 + [1] * 2, [1] * 6)

    def test_a_late_decode_does_not_pass_for_one_of_the_present_run(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 1)
        pair.step((A, 0, 8))
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.step((A, 0, 5), version=1)
        late = pair.plan((A, 5, 1), version=1)
        pair.release(A, ReleaseReason.PREEMPTED)
        whole = pair.plan((A, 0, 8), version=2)
        pair.publish(A, 0, H0)
        pair.publish(A, 1, H1)
        pair.begin(B, 9)
        pair.share(B, [H0, H1])
        for step in (late, whole):
            pair.store(step)
            pair.compare(9)
        assert pair.ledger.read(B, 0, 8).version_T.tolist() == [2] * 8

    def test_a_late_decode_does_not_begin_the_block_of_the_present_run(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 1)
        pair.step((A, 0, 4))
        late = pair.plan((A, 4, 1))
        pair.release(A, ReleaseReason.PREEMPTED)
        whole = pair.plan((A, 0, 8), version=1)
        pair.publish(A, 0, H0)
        pair.publish(A, 1, H1)
        pair.begin(B, 9)
        pair.share(B, [H0, H1])
        for step in (late, whole):
            pair.store(step)
            pair.compare(9)
        version_T = pair.ledger.read(A, 0, 8).version_T
        assert version_T.tolist() == pair.chosen([0] * 5 + [1] * 3, [1] * 8)
        assert pair.ledger.read(B, 0, 8).version_T.tolist() == [1] * 8

    def test_a_sharer_is_preempted_while_the_maker_goes_on_decoding(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 1)
        pair.step((A, 0, 2))
        pair.publish(A, 0, H0)
        late = [pair.plan((A, 2, 1)), pair.plan((A, 3, 1))]
        pair.begin(B, 5)
        pair.share(B, [H0])
        pair.release(B, ReleaseReason.PREEMPTED)
        for step in late:
            pair.store(step)
            pair.compare(5)
        pair.release(A, ReleaseReason.FINISHED)
        pair.withdraw(H0)
        pair.begin(C, 4)
        pair.step((C, 0, 4))
        pair.compare(5)
        assert pair.ledger.read(B, 0, 4).origin_T.tolist() == [Origin.PREFIX_CACHE] * 4
