"""Rows of requests that share nothing."""

# The names of the tests are their sentences.
# ruff: noqa: D102

from __future__ import annotations

from dataclasses import replace

import numpy as np

from routebook.ledger.base import ReleaseReason, StepRows
from routebook.ledger.conformance.case import A, B, C, ConformanceCase
from routebook.routes.provenance import Origin, Provenance
from routebook.routes.schema import RouteSchema


class RowsConformance(ConformanceCase):
    """Rows of requests that share nothing."""

    def test_rows_of_a_mixed_batch_reach_their_requests(self) -> None:
        for block_size in (1, 4, 16):
            pair = self.make_pair(block_size)
            for request_id, prompt in ((A, 9), (B, 1), (C, 40)):
                pair.begin(request_id, prompt)
            pair.step((C, 0, 33), (A, 0, 9), (B, 0, 1))
            pair.step((B, 1, 1), (C, 33, 7), (A, 9, 1))
            pair.step((A, 10, 1), (C, 40, 1))
            pair.compare(50)

    def test_every_range_reads_the_same_rows(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 10)
        pair.step((A, 0, 10))
        for start in range(13):
            for stop in range(start, 13):
                pair.compare_range(A, start, stop)

    def test_origin_follows_the_prompt_and_version_the_step(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 6)
        pair.step((A, 0, 5), version=3)
        pair.step((A, 5, 2), version=4)
        pair.step((A, 7, 1), version=2**32 - 1)
        assert pair.compare_range(A, 0, 9).provenance == (
            Provenance(0, 5, 3, Origin.PREFILL),
            Provenance(5, 6, 4, Origin.PREFILL),
            Provenance(6, 7, 4, Origin.DECODE),
            Provenance(7, 8, 2**32 - 1, Origin.DECODE),
        )

    def test_what_was_never_stored_is_absent(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 4)
        assert not pair.compare_range(A, 0, 9).origin_T.any()
        pair.step((A, 9, 1))
        assert pair.compare_range(A, 0, 12).origin_T.nonzero()[0].tolist() == [9]
        pair.compare_range(A, 1000, 1100)

    def test_a_used_chunk_does_not_shine_through(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 4)
        pair.step((A, 0, 200), version=7)
        pair.release(A, ReleaseReason.FINISHED)
        for request_id in (B, C):
            pair.begin(request_id, 4)
            pair.step((request_id, 1, 1))
        pair.step((B, 90, 1), (C, 3, 1))
        pair.compare(220)

    def test_reads_are_private_copies(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 8)
        pair.step((A, 0, 8))
        rows = pair.ledger.read(A, 0, 8)
        for array in (rows.ids_TLK, rows.origin_T, rows.version_T):
            array[...] = 5
        pair.compare(8)

    def test_the_ends_of_both_dtypes(self) -> None:
        for num_experts, ids in ((256, [0, 254, 255]), (512, [255, 256, 511])):
            schema = RouteSchema(
                layer_ids=(3,), num_experts=num_experts, top_k=3, num_hidden_layers=4
            )
            ledger = self.make_ledger(schema, 4, 8)
            ledger.begin(A, 1)
            ledger.assign(A, [5])
            ledger.store_batch(one_row(schema, A, ids))
            rows = ledger.read(A, 0, 2)
            assert rows.ids_TLK.dtype == schema.dtype
            assert rows.ids_TLK.tolist() == [[ids], [[schema.absent] * 3]]
            assert rows.origin_T.tolist() == [Origin.PREFILL, Origin.ABSENT]

    def test_many_requests_and_long_ones(self) -> None:
        pair = self.make_pair(16)
        names = [f"r{i}" for i in range(100)]
        for i, name in enumerate(names):
            pair.begin(name, i)
        pair.step(*((name, 0, i) for i, name in enumerate(names)))
        for t in range(3):
            pair.step(*((name, i + t, 1) for i, name in enumerate(reversed(names))))
        pair.begin(A, 3000)
        pair.step((A, 0, 3000))
        for name in names[::2]:
            pair.release(name, ReleaseReason.FINISHED)
        pair.step((A, 3000, 1), *((name, 200, 17) for name in names[1::2]))
        pair.compare(250)
        pair.compare_range(A, 0, 3010)

    def test_one_computation_of_several_wins(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 6)
        pair.step((A, 0, 6))
        pair.step((A, 6, 1))
        for run in (1, 2):
            pair.release(A, ReleaseReason.PREEMPTED)
            pair.compare_range(A, 0, 12)
            pair.step((A, 0, 5), version=run)
            pair.compare_range(A, 0, 12)
            pair.step((A, 5, 3 + run), version=run)
        rows = pair.compare_range(A, 0, 11)
        assert rows.version_T.tolist() == pair.chosen([0] * 7 + [1, 1, 2, 0], [2] * 10 + [0])
        earliest = [Origin.PREFILL] * 6 + [Origin.DECODE] * 4
        latest = [Origin.RECOMPUTED] * 9 + [Origin.DECODE]
        assert rows.origin_T.tolist() == [*pair.chosen(earliest, latest), Origin.ABSENT]

    def test_a_position_stored_again_in_the_same_run_keeps_its_row(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 6)
        pair.step((A, 2, 3))
        pair.step((A, 0, 9), version=1)
        assert pair.compare_range(A, 0, 9).version_T.tolist() == [1, 1, 0, 0, 0, 1, 1, 1, 1]

    def test_a_late_step_of_an_earlier_run_lands_in_its_request(self) -> None:
        pair = self.make_pair()
        pair.begin(A, 6)
        late = pair.plan((A, 0, 6))
        pair.release(A, ReleaseReason.PREEMPTED)
        again = pair.plan((A, 0, 6), version=1)
        pair.store(late)
        pair.store(again)
        version_T = pair.compare_range(A, 0, 6).version_T
        assert version_T.tolist() == pair.chosen([0] * 6, [1] * 6)

    def test_requests_that_are_gone_are_skipped(self) -> None:
        pair = self.make_pair()
        for request_id in (A, B, C):
            pair.begin(request_id, 8)
        step = pair.plan((A, 0, 5), (B, 0, 6), (C, 0, 7))
        pair.release(B, ReleaseReason.ABORTED)
        pair.store(step)
        rows = pair.run_model(pair.plan((C, 30, 3)))
        pair.ledger.store_batch(replace(rows, request_ids=["never begun"], runs_R=None))
        pair.step((A, 5, 1))
        pair.compare(10)

    def test_decodes_told_twice_keep_the_first(self) -> None:
        """Whatever kind of step told a position first, and whatever kind tells it again."""
        pair = self.make_pair(16)
        pair.begin(A, 3)
        pair.begin(B, 3)
        pair.step((A, 0, 3), (B, 0, 3))
        pair.step((A, 3, 1), (B, 3, 1))
        pair.step((A, 4, 1), (B, 4, 2))
        pair.step((A, 4, 1), (B, 4, 1))
        pair.step((A, 5, 1), (B, 6, 1))
        pair.step((A, 5, 1), (B, 6, 1))
        pair.compare(12)

    def test_decodes_of_two_runs_do_not_pass_for_one_block(self) -> None:
        pair = self.make_pair(4)
        pair.begin(A, 1)
        pair.begin(B, 5)
        pair.step((A, 0, 1))
        pair.step((A, 1, 1))
        pair.step((A, 2, 1))
        pair.release(A, ReleaseReason.PREEMPTED)
        pair.step((A, 3, 1))
        pair.publish(A, 0, b"block")
        pair.share(B, [b"block"])
        pair.compare(6)


def one_row(schema: RouteSchema, request_id: str, ids: list[int]) -> StepRows:
    """A step of one row at position 0."""
    return StepRows(
        request_ids=[request_id],
        starts_R=np.array([0]),
        counts_R=np.array([1]),
        ids_TLK=np.array(ids, schema.dtype).reshape(schema.shape(1)),
        weight_version=0,
    )
