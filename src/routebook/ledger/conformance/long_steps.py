"""Steps with many whole blocks of a request, which a ledger may write block by block."""

# The names of the tests are their sentences.
# ruff: noqa: D102

from __future__ import annotations

from routebook.ledger.base import ReleaseReason
from routebook.ledger.conformance.case import A, B, C, ConformanceCase
from routebook.ledger.conformance.pair import LedgerPair

MANY = [b"h%d" % block for block in range(40)]


class LongStepsConformance(ConformanceCase):
    """Steps with many whole blocks of a request, which a ledger may write block by block."""

    def test_long_prompts_in_any_pieces(self) -> None:
        for block_size in (1, 4, 16):
            pair = self.make_pair(block_size)
            pair.begin(A, 700)
            pair.begin(B, 3)
            pair.begin(C, 150)
            pair.step((A, 0, 300), (B, 0, 3), (C, 0, 0))
            pair.publish(A, 1, MANY[0])
            pair.step((B, 3, 1), (A, 300, 301), (C, 0, 130))
            pair.step((C, 130, 45), (A, 601, 99), (B, 4, 129))
            pair.compare(720)

    def test_long_prompts_among_scattered_blocks(self) -> None:
        pair = self.make_pair()
        names = [f"r{i}" for i in range(40)]
        for i, name in enumerate(names):
            pair.begin(name, 9)
            pair.step((name, 0, 5 + i % 3))
        for name in names[::2]:
            pair.release(name, ReleaseReason.FINISHED)
        pair.begin(A, 250)
        pair.step((A, 0, 250))
        pair.compare_range(A, 0, 260)

    def test_a_long_step_told_again_keeps_the_first_rows(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 200)
        pair.step((A, 64, 1))
        pair.step((A, 0, 200), version=1)
        pair.step((A, 0, 240), version=2)
        pair.compare(250)

    def test_a_long_step_of_a_request_that_is_gone(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 200)
        _publish_all(pair)
        late = pair.plan((A, 0, 200))
        pair.begin(B, 200)
        pair.share(B, MANY)
        pair.release(A, ReleaseReason.ABORTED)
        pair.store(late)
        pair.compare(210)
        assert pair.ledger.read(B, 0, 160).origin_T.all()

    def test_a_long_step_told_again_in_the_next_run(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 200)
        first = pair.plan((A, 0, 200))
        pair.store(first)
        pair.release(A, ReleaseReason.PREEMPTED)
        again = pair.plan((A, 0, 200), version=1)
        pair.publish(A, 3, MANY[0])
        pair.store(first)
        pair.store(again)
        pair.begin(B, 20)
        pair.share(B, MANY[3:6] + MANY[:1])
        pair.compare(210)

    def test_a_long_recomputation(self) -> None:
        for publish in (True, False):
            pair = self.make_pair()
            pair.begin(A, 200)
            pair.step((A, 0, 200))
            late = pair.plan((A, 200, 160))
            pair.release(A, ReleaseReason.PREEMPTED)
            again = pair.plan((A, 0, 361), version=1)
            if publish:
                _publish_all(pair)
            pair.store(late)
            pair.store(again)
            pair.begin(B, 200)
            pair.share(B, MANY)
            pair.compare(370)

    def test_a_sharer_that_computes_long_again_writes_nowhere_else(self) -> None:
        for rows_first in (True, False):
            pair = self.make_pair()
            pair.begin(A, 200)
            _publish_all(pair)
            maker = pair.plan((A, 0, 200))
            pair.begin(B, 200)
            pair.share(B, MANY)
            sharer = pair.plan((B, 0, 200), version=1)
            for step in (maker, sharer) if rows_first else (sharer, maker):
                pair.store(step)
            pair.begin(C, 200)
            pair.share(C, MANY)
            pair.compare(210)

    def test_a_sharer_is_preempted_before_the_long_step_of_the_maker(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 200)
        _publish_all(pair)
        maker = pair.plan((A, 0, 200))
        pair.begin(B, 200)
        pair.share(B, MANY)
        pair.release(B, ReleaseReason.PREEMPTED)
        pair.store(maker)
        pair.compare(210)
        assert pair.ledger.read(B, 0, 160).origin_T.all()


def _publish_all(pair: LedgerPair) -> None:
    for block, block_hash in enumerate(MANY):
        pair.publish(A, block, block_hash)
