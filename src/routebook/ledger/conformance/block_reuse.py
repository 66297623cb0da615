"""KV blocks that pass to another request while rows of their old owner are on the way, or not yet read."""

# The names of the tests are their sentences.
# ruff: noqa: D102

from __future__ import annotations

from routebook.ledger.base import ReleaseReason
from routebook.ledger.conformance.case import H0, A, B, C, ConformanceCase
from routebook.ledger.conformance.pair import LedgerPair, PlannedStep
from routebook.routes.provenance import Origin


class BlockReuseConformance(ConformanceCase):
    """The pool hands out first what was freed last, so `take_over` gets the blocks that were just freed."""

    def test_freed_blocks_are_used_again_before_the_rows_are_read(self) -> None:
        for block_size in (1, 4, 16):
            pair = self.make_pair(block_size)
            pair.begin(A, 9)
            pair.step((A, 0, 9))
            pair.step((A, 9, 1))
            pair.release(A, ReleaseReason.PREEMPTED)
            pair.store(take_over(pair, B, 10))
            pair.compare(12)
            assert pair.ledger.read(A, 0, 10).origin_T.all()

    def test_preempted_in_step_n_plus_1_before_the_output_of_step_n(self) -> None:
        for depth in (1, 2, 3):
            pair = self.make_pair()
            pair.begin(A, 6)
            pair.step((A, 0, 6))
            late = [pair.plan((A, 6 + i, 1)) for i in range(depth)]
            pair.release(A, ReleaseReason.PREEMPTED)
            other = take_over(pair, B, 6 + depth)
            for step in [*late, other]:
                pair.store(step)
                pair.compare(12)
            assert pair.ledger.read(A, 0, 6 + depth).origin_T.all()

    def test_late_rows_do_not_land_on_rows_of_the_new_owner(self) -> None:
        """Nor may a row of the old owner stand where the new one's is awaited."""
        for reason in ReleaseReason:
            pair = self.make_pair()
            pair.begin(A, 6)
            late = [pair.plan((A, 0, 6)), pair.plan((A, 6, 1))]
            pair.release(A, reason)
            other = take_over(pair, B, 7)
            for step in late:
                pair.store(step)
                assert not pair.compare_range(B, 0, 8).origin_T.any()
            pair.store(other)
            pair.compare(9)

    def test_a_slot_of_the_last_owner_is_absent_until_the_new_row_comes(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 8)
        pair.step((A, 0, 8))
        pair.release(A, ReleaseReason.FINISHED)
        step = take_over(pair, B, 8)
        assert not pair.compare_range(B, 0, 8).origin_T.any()
        pair.store(step)
        pair.compare(9)

    def test_a_request_gets_its_own_old_blocks_back(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 6)
        pair.step((A, 0, 6))
        late = pair.plan((A, 6, 2))
        pair.release(A, ReleaseReason.PREEMPTED)
        again = pair.plan((A, 0, 8), version=1)
        pair.store(late)
        pair.compare(9)
        pair.store(again)
        more = pair.plan((A, 8, 1), version=1)
        pair.store(more)
        version_T = pair.compare_range(A, 0, 9).version_T
        assert version_T.tolist() == pair.chosen([0] * 8 + [1], [1] * 9)

    def test_a_shorter_second_run_does_not_shorten_what_is_kept(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 9)
        pair.step((A, 0, 9))
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.store(take_over(pair, B, 9))
        pair.step((A, 0, 3), version=1)
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.store(take_over(pair, C, 9))
        version_T = pair.compare_range(A, 0, 9).version_T
        assert version_T.tolist() == pair.chosen([0] * 9, [1] * 3 + [0] * 6)
        assert pair.ledger.read(A, 0, 9).origin_T.all()
        pair.compare(10)

    def test_a_longer_second_run_adds_to_what_is_kept(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 9)
        pair.step((A, 0, 3))
        for run, stop in ((1, 6), (2, 9)):
            late = pair.plan((A, stop - 3, 1), version=run - 1)
            pair.release(A, ReleaseReason.PREEMPTED)
            other = take_over(pair, f"other {run}", 9)
            pair.store(late)
            pair.store(other)
            pair.step((A, 0, stop), version=run)
            pair.compare(10)
        version_T = pair.ledger.read(A, 0, 9).version_T
        assert version_T.tolist() == pair.chosen([0] * 4 + [1] * 3 + [2] * 2, [2] * 9)

    def test_a_shared_block_that_was_freed_and_used_again_before_its_rows_came(self) -> None:
        """The sharer is preempted, the maker aborted, the block evicted and handed out: the rows still come."""
        for reason in (ReleaseReason.ABORTED, ReleaseReason.PREEMPTED):
            pair = self.make_pair()
            pair.begin(A, 4)
            pair.step((A, 0, 1))
            pair.publish(A, 0, H0)
            late = [pair.plan((A, 1, 1)), pair.plan((A, 2, 2))]
            pair.begin(B, 5)
            pair.share(B, [H0])
            pair.release(B, ReleaseReason.PREEMPTED)
            pair.release(A, reason)
            pair.withdraw(H0)
            other = take_over(pair, C, 9)
            for step in [*late, other]:
                pair.store(step)
                pair.compare(10)
            assert pair.ledger.read(B, 0, 4).origin_T.tolist() == [Origin.PREFIX_CACHE] * 4

    def test_a_late_own_row_and_a_shared_one_that_is_kept(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 8)
        pair.begin(B, 8)
        pair.publish(B, 0, H0)
        pair.step((B, 0, 8))
        late = [pair.plan((A, 0, 2)), pair.plan((A, 2, 2))]
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.share(A, [H0])
        pair.compare(9)
        pair.release(A, ReleaseReason.PREEMPTED)
        other = take_over(pair, C, 9)
        for step in [*late, other]:
            pair.store(step)
            pair.compare(9)
        origin_T = pair.ledger.read(A, 0, 4).origin_T
        assert origin_T.tolist() == pair.chosen([Origin.PREFILL] * 4, [Origin.PREFIX_CACHE] * 4)

    def test_a_block_shared_again_from_another_maker(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 4)
        pair.publish(A, 0, H0)
        late = pair.plan((A, 0, 4))
        pair.begin(B, 5)
        pair.share(B, [H0])
        pair.release(B, ReleaseReason.PREEMPTED)
        pair.withdraw(H0)
        pair.begin(C, 5)
        pair.publish(C, 0, H0)
        pair.share(B, [H0])
        again = pair.plan((C, 0, 5), (B, 4, 1), version=1)
        pair.store(late)
        pair.compare(6)
        pair.store(again)
        pair.compare(6)
        version_T = pair.ledger.read(B, 0, 5).version_T
        assert version_T.tolist() == pair.chosen([0] * 4 + [1], [1] * 5)

    def test_a_request_shares_its_own_block_whose_rows_are_on_the_way(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 8)
        pair.publish(A, 0, H0)
        late = pair.plan((A, 0, 5))
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.share(A, [H0])
        step = pair.plan((A, 4, 4), version=1)
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.store(late)
        pair.store(step)
        pair.compare(9)
        prefill, shared = [Origin.PREFILL], [Origin.PREFIX_CACHE]
        latest = shared * 4 + [Origin.RECOMPUTED] + prefill * 3
        origin_T = pair.ledger.read(A, 0, 8).origin_T
        assert origin_T.tolist() == pair.chosen(prefill * 8, latest)

    def test_an_evicted_block_changes_hands_under_its_late_rows(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 8)
        pair.publish(A, 0, H0)
        late = pair.plan((A, 0, 8))
        pair.release(A, ReleaseReason.ABORTED)
        pair.withdraw(H0)
        others = [take_over(pair, name, 8) for name in (B, C)]
        pair.store(late)
        pair.compare(9)
        for step in others:
            pair.store(step)
        pair.compare(9)

    def test_blocks_go_round_for_a_long_time(self) -> None:
        pair = self.make_pair()
        steps: list[PlannedStep] = []
        for i in range(60):
            name, reason = f"r{i % 7}", list(ReleaseReason)[i % 3]
            if name not in pair.oracle.living:
                pair.begin(name, 5)
            steps.append(pair.plan((name, 0, 5 + i % 4), version=i))
            pair.release(name, reason)
            while len(steps) > 3:
                pair.store(steps.pop(0))
            pair.compare(10)


def take_over(pair: LedgerPair, request_id: str, num_rows: int) -> PlannedStep:
    """Begin a request that takes the blocks which were freed last, and plan its first step."""
    pair.begin(request_id, num_rows)
    return pair.plan((request_id, 0, num_rows), version=9)
