"""Steps of one row for each request, which a ledger may take over and write together."""

# The names of the tests are their sentences.
# ruff: noqa: D102

from __future__ import annotations

from dataclasses import replace

import numpy as np

from routebook.ledger.base import ReleaseReason
from routebook.ledger.conformance.case import H0, H1, A, B, C, ConformanceCase, D, refuses
from routebook.ledger.conformance.pair import LedgerPair


class DecodesConformance(ConformanceCase):
    """Steps of one row for each request, which a ledger may take over and write together."""

    def make_decoders(self, block_size: int = 4) -> LedgerPair:
        """A has 7 rows, B has 2, and both have been decoded once since their prompts."""
        pair = self.make_pair(block_size)
        pair.begin(A, 6)
        pair.begin(B, 1)
        pair.step((A, 0, 6), (B, 0, 1))
        pair.step((A, 6, 1), (B, 1, 1))
        return pair

    def test_rows_are_there_after_any_number_of_steps(self) -> None:
        for block_size in (1, 4, 16):
            for every in (1, 2, 7, 40):
                pair = self.make_decoders(block_size)
                for t in range(40):
                    pair.step((A, 7 + t, 1), (B, 2 + t, 1))
                    if t % every == every - 1:
                        pair.compare(60)

    def test_long_runs_of_decodes(self) -> None:
        pair = self.make_pair(16)
        pair.begin(A, 1)
        for t in range(600):
            pair.step((A, t, 1))
        pair.begin(B, 1)
        pair.begin(C, 700)
        for t in range(300):
            pair.step((C, t, 1), (A, 600 + t, 1), (B, t, 1))
        pair.compare(920)

    def test_batches_that_differ_in_one_thing(self) -> None:
        pair = self.make_decoders()
        pair.step((A, 7, 1), (B, 2, 1))
        pair.step((B, 3, 1), (A, 8, 1))
        pair.step((B, 4, 1))
        pair.step((B, 5, 1), (A, 9, 1), version=1)
        pair.step((B, 6, 1), (A, 11, 1), version=1)
        pair.step((B, 7, 1), (A, 12, 1), version=1)
        pair.step((B, 8, 2), (A, 13, 0), version=1)
        pair.step((B, 10, 0), (A, 13, 2), version=1)
        pair.step((B, 10, 1), (A, 15, 1), version=1)
        pair.begin(C, 1)
        pair.step((B, 11, 1), (A, 16, 1), (C, 0, 1), version=1)
        pair.compare(20)

    def test_a_step_told_again_keeps_the_first_rows(self) -> None:
        pair = self.make_decoders()
        for start in (7, 8, 9, 8, 9, 10, 11):
            pair.step((A, start, 1), (B, start - 5, 1))
        pair.step((A, 2, 1), (B, 1, 1))
        pair.step((A, 3, 1), (B, 2, 1))
        pair.compare(16)

    def test_prompts_computed_row_by_row_are_prefill(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 5)
        for t in range(9):
            pair.step((A, t, 1))
        assert pair.compare_range(A, 0, 9).origin_T.tolist() == [1] * 5 + [2] * 4

    def test_preempted_between_decodes(self) -> None:
        """The rows that were taken over are of the run that ends, whoever tells the next ones."""
        for tell_runs in (True, False):
            pair = self.make_decoders()
            pair.step((A, 7, 1), (B, 2, 1))
            pair.release(A, ReleaseReason.PREEMPTED)
            pair.compare_range(A, 0, 9)
            for t in range(3):
                step = pair.plan((A, 8 + t, 1), (B, 3 + t, 1), version=1)
                pair.store(step, tell_runs=tell_runs)
            pair.publish(A, 2, H0)
            pair.begin(C, 13)
            pair.share(C, [H1, H1, H0])
            pair.compare(14)

    def test_recomputed_row_by_row(self) -> None:
        pair = self.make_decoders()
        pair.step((A, 7, 1), (B, 2, 1))
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.publish(A, 0, H0)
        for t in range(11):
            pair.step((A, t, 1), (B, 3 + t, 1), version=1)
        pair.begin(C, 5)
        pair.share(C, [H0])
        pair.compare(16)
        assert pair.ledger.read(C, 0, 4).version_T.tolist() == [1] * 4

    def test_a_late_decode_of_an_earlier_run_does_not_go_on(self) -> None:
        pair = self.make_decoders()
        late = pair.plan((A, 7, 1), (B, 2, 1))
        pair.store(pair.plan((A, 7, 1), (B, 2, 1)))
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.store(late)
        pair.step((A, 0, 8), (B, 3, 1), version=1)
        pair.compare(12)

    def test_ends_with_steps_not_looked_at(self) -> None:
        for reason in (ReleaseReason.FINISHED, ReleaseReason.ABORTED):
            pair = self.make_decoders()
            pair.publish(A, 1, H0)
            pair.step((A, 7, 1), (B, 2, 1))
            pair.step((A, 8, 1), (B, 3, 1))
            pair.release(A, reason)
            pair.begin(C, 9)
            pair.share(C, [H1, H0])
            pair.step((B, 4, 1))
            pair.compare(12)
            assert pair.ledger.read(C, 4, 8).origin_T.all()

    def test_an_id_that_is_used_again_begins_anew(self) -> None:
        """At the very place, and in the very batch, where the old request of this id would have gone on."""
        pair = self.make_decoders()
        pair.step((A, 7, 1), (B, 2, 1))
        pair.release(A, ReleaseReason.FINISHED)
        pair.begin(C, 1)
        pair.begin(A, 8)
        pair.step((A, 8, 1), (B, 3, 1))
        pair.step((A, 9, 1), (B, 4, 1), version=1)
        pair.compare(12)

    def test_blocks_published_before_their_rows(self) -> None:
        pair = self.make_decoders()
        steps = [pair.plan((A, 7 + t, 1), (B, 2 + t, 1)) for t in range(3)]
        pair.publish(A, 1, H0)
        pair.publish(B, 0, H1)
        pair.begin(C, 9)
        pair.share(C, [H1, H0])
        for step in steps:
            pair.store(step)
        pair.compare(12)
        assert pair.ledger.read(C, 0, 8).origin_T.all()

    def test_hashes_come_and_go_between_decodes(self) -> None:
        pair = self.make_decoders()
        pair.publish(A, 1, H0)
        pair.step((A, 7, 1), (B, 2, 1))
        pair.withdraw(H0)
        pair.step((A, 8, 1), (B, 3, 1))
        pair.publish(B, 0, H1)
        pair.begin(D, 5)
        pair.share(D, [H1])
        pair.reset()
        pair.step((A, 9, 1), (B, 4, 1))
        pair.publish(A, 1, H1)
        pair.compare(12)
        assert pair.ledger.read(D, 0, 4).origin_T.all()

    def test_refusals_come_at_once(self) -> None:
        """Also in the midst of decodes that are right, and the steps around are kept."""
        pair = self.make_decoders()
        plan = pair.plan((A, 7, 1), (B, 2, 1))
        for t in range(12):
            good = pair.run_model(plan)
            ids = good.ids_TLK
            bad = [
                replace(good, ids_TLK=ids[:1]),
                replace(good, ids_TLK=ids[:, :2]),
                replace(good, ids_TLK=ids.astype(np.int64)),
                replace(good, ids_TLK=np.repeat(ids, 2, axis=2)[..., ::2]),
                replace(good, request_ids=[A, A]),
                replace(good, starts_R=good.starts_R.astype(np.uint64)),
                replace(good, starts_R=good.starts_R[:, None]),
                replace(good, counts_R=good.counts_R.astype(np.uint64)),
                replace(good, counts_R=np.array([2, -1])),
                replace(good, runs_R=np.array([1, 0])),
                replace(good, runs_R=np.array([0, 0], np.uint64)),
                replace(good, runs_R=np.array([0])),
            ]
            refused = bad[t]
            refuses(lambda step=refused: pair.ledger.store_batch(step))  # type: ignore[misc]
            pair.store(plan)
            (_, a, _), (_, b, _) = plan.pieces
            plan = pair.plan((A, a + 1, 1), (B, b + 1, 1))
        pair.compare(40)

    def test_what_is_told_beside_the_ids_may_change_after_the_store(self) -> None:
        pair = self.make_decoders()
        pair.step((B, 2, 5))
        names, starts, counts, runs = [A, B], *(np.zeros(2, np.int64) for _ in range(3))
        for t in range(4):
            # The last batch is the first one with its requests changed round.
            names[:] = [A, B] if t < 3 else [B, A]
            starts[:], counts[:], runs[:] = 7 + t, 1, 0
            plan = pair.plan(*((name, 7 + t, 1) for name in names))
            rows = pair.run_model(plan)
            pair.note(plan, rows)
            told = replace(rows, request_ids=names, starts_R=starts, counts_R=counts, runs_R=runs)
            pair.ledger.store_batch(told)
            names.reverse()
            starts[:] = counts[:] = runs[:] = 9
        pair.compare(14)
        pair.publish(A, 2, H0)
        pair.begin(C, 13)
        pair.share(C, [H1, H1, H0])
        pair.compare(14)

    def test_usage_counts_rows_that_were_only_taken_over(self) -> None:
        pair = self.make_decoders()
        for t in range(9):
            pair.step((A, 7 + t, 1), (B, 2 + t, 1))
        assert pair.ledger.usage().request_chunks == 4 + 3

    def test_the_arrays_of_a_step_are_not_written_to(self) -> None:
        pair = self.make_decoders()
        rows = pair.run_model(pair.plan((A, 7, 1), (B, 2, 1)))
        for array in (rows.ids_TLK, rows.starts_R, rows.counts_R, rows.runs_R):
            assert array is not None
            array.flags.writeable = False
        pair.ledger.store_batch(rows)
        pair.ledger.read(A, 0, 20).ids_TLK[...] = 0
        assert (pair.ledger.read(A, 7, 8).ids_TLK == rows.ids_TLK[:1]).all()
