"""Which row a position has that several runs computed or took, and what is kept of the others."""

# The names of the tests are their sentences.
# ruff: noqa: D102

from __future__ import annotations

from itertools import permutations

from routebook.ledger.base import ReleaseReason
from routebook.ledger.conformance.case import H0, A, B, C, ConformanceCase
from routebook.ledger.conformance.pair import LedgerPair
from routebook.routes.provenance import Origin, Provenance


class RecomputationConformance(ConformanceCase):
    """Which row a position has that several runs computed or took, and what is kept of the others."""

    def test_provenance_shows_which_rows_were_computed_again(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 6)
        pair.step((A, 0, 6))
        pair.step((A, 6, 1))
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.step((A, 0, 3), version=1)
        once = pair.compare_range(A, 0, 9).provenance
        pair.step((A, 3, 5), version=1)
        twice = pair.compare_range(A, 0, 9).provenance
        if pair.ledger.recompute == "earliest":
            first = Provenance(0, 6, 0, Origin.PREFILL), Provenance(6, 7, 0, Origin.DECODE)
            assert once == first
            assert twice == (*first, Provenance(7, 8, 1, Origin.DECODE))
        else:
            assert once == (
                Provenance(0, 3, 1, Origin.RECOMPUTED),
                Provenance(3, 6, 0, Origin.PREFILL),
                Provenance(6, 7, 0, Origin.DECODE),
            )
            assert twice == (
                Provenance(0, 7, 1, Origin.RECOMPUTED),
                Provenance(7, 8, 1, Origin.DECODE),
            )

    def test_late_rows_and_rows_of_a_maker_arrive_in_any_order(self) -> None:
        """A computes in run 0, takes the block of B in run 1 and that of C in run 2, and computes again in run 3."""
        for order in permutations(range(3)):
            for cut in (0, 2, 4):
                pair = self.make_pair()
                pair.begin(A, 5)
                steps = [pair.plan((A, 0, 4))]
                for run, maker in ((1, B), (2, C)):
                    pair.release(A, ReleaseReason.PREEMPTED)
                    pair.begin(maker, 5)
                    pair.publish(maker, 0, H0)
                    steps.append(pair.plan((maker, 0, 4), version=run))
                    pair.share(A, [H0])
                    pair.withdraw(H0)
                for which in order:
                    pair.store(steps[which])
                    pair.compare(6)
                pair.release(A, ReleaseReason.PREEMPTED)
                pair.step((A, 0, cut), version=3)
                pair.compare(6)
                pair.release(A, ReleaseReason.PREEMPTED)
                pair.compare(6)
                version_T = pair.ledger.read(A, 0, 4).version_T
                assert version_T.tolist() == pair.chosen([0] * 4, [3] * cut + [2] * (4 - cut))

    def test_what_a_run_took_goes_before_what_it_computes_there(self) -> None:
        for maker_first in (True, False):
            for preempted_between in (True, False):
                pair = self.make_pair()
                pair.begin(A, 5)
                pair.publish(A, 0, H0)
                maker = pair.plan((A, 0, 4))
                pair.begin(B, 5)
                pair.share(B, [H0])
                steps = [maker, pair.plan((B, 1, 3), version=1)]
                if not maker_first:
                    steps.reverse()
                pair.store(steps[0])
                pair.compare(6)
                if preempted_between:
                    pair.release(B, ReleaseReason.PREEMPTED)
                pair.store(steps[1])
                pair.compare(6)
                pair.release(B, ReleaseReason.PREEMPTED)
                pair.compare(6)
                assert pair.ledger.read(B, 0, 4).origin_T.tolist() == [Origin.PREFIX_CACHE] * 4

    def test_runs_that_end_anywhere(self) -> None:
        for block_size in (1, 4, 16):
            pair = self.make_pair(block_size)
            pair.begin(A, 7)
            for run, stop in enumerate((12, 5, 9, 0, 21, 4)):
                pair.step((A, 0, stop), version=run)
                pair.compare(24)
                pair.release(A, ReleaseReason.PREEMPTED)
                pair.compare(24)
            pair.step((A, 0, 23), version=6)
            pair.compare(24)

    def test_a_run_that_takes_what_the_request_made_itself(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 5)
        pair.publish(A, 0, H0)
        pair.step((A, 0, 5))
        for run in (1, 2):
            pair.release(A, ReleaseReason.PREEMPTED)
            pair.share(A, [H0])
            pair.step((A, 4, 1 + run), version=run)
            pair.compare(9)
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.step((A, 0, 6), version=3)
        pair.compare(9)

    def test_what_is_published_is_of_one_run_whichever_is_read(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 9)
        for run in range(4):
            pair.publish(A, 0, b"%d" % run)
            pair.publish(A, 1, b"+%d" % run)
            pair.step((A, 0, 6), version=run)
            late = pair.plan((A, 6, 2), version=run)
            pair.begin(f"sharer {run}", 9)
            pair.share(f"sharer {run}", [b"%d" % run, b"+%d" % run])
            pair.release(A, ReleaseReason.PREEMPTED)
            pair.store(late)
            pair.compare(9)
        for run in range(4):
            assert pair.ledger.read(f"sharer {run}", 0, 8).version_T.tolist() == [run] * 8

    def test_runs_do_not_pile_up(self) -> None:
        """What no choice can show any more is not kept."""
        pair = self.make_pair()
        pair.begin(A, 40)
        counts, sizes = [], []
        for run in range(12):
            pair.step((A, 0, 40), version=run)
            pair.release(A, ReleaseReason.PREEMPTED)
            pair.compare(41)
            usage = pair.ledger.usage()
            counts.append(usage.request_chunks)
            sizes.append(usage.capacity_nbytes)
        assert counts == [10] * 12
        assert sizes[-1] == sizes[1]

    def test_a_request_that_computes_again_gives_everything_back(self) -> None:
        pair = self.make_pair()
        for name in (A, B):
            compute_again(pair, name)
            pair.release(name, ReleaseReason.ABORTED)
        usage = pair.ledger.usage()
        assert (usage.requests, usage.request_chunks, usage.published) == (0, 0, 4)
        pair.ledger.check_integrity()
        pair.reset()
        pair.ledger.check_integrity()


def compute_again(pair: LedgerPair, name: str) -> None:
    """Let a request have every kind of row in its first two blocks."""
    pair.begin(name, 9)
    hashes = [f"{name} {block}".encode() for block in range(2)]
    for run in range(4):
        if run % 2 == 0:
            pair.withdraw(*hashes)
            for block, block_hash in enumerate(hashes):
                pair.publish(name, block, block_hash)
            pair.step((name, 0, 5 + run), version=run)
        else:
            pair.share(name, hashes)
            pair.step((name, 8, run), version=run)
        pair.compare(14)
        pair.release(name, ReleaseReason.PREEMPTED)
        pair.compare(14)
    pair.step((name, 0, 3), version=9)
    pair.compare(14)
