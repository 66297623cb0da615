"""What a layout refuses: plans, batches, records and ranks that do not fit, each by name and with a remedy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from routebook.errors import (
    ConfigError,
    RecordError,
    SchemaMismatchError,
    SpanError,
    TokenMismatchError,
)
from routebook.routes import (
    MicroBatch,
    PackedSequences,
    PackingConfig,
    PaddedSequences,
    ParallelPlan,
    ParallelRank,
    RoutedExperts,
    RowLayout,
    collect_records,
    stage_layers,
)
from tests.routes.layout_cases import all_ranks
from tests.routes.strategies import make_record, make_schema, tokens


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
        ({"context_parallel_layout": "ring"}, "context_parallel_layout='ring'"),
        ({"sequence_parallel": True}, "tensor_parallel_size=1; drop it"),
        ({"virtual_pipeline_size": 2}, "pipeline_parallel_size=1"),
        ({"num_layers_in_first_pipeline_stage": 2}, "pipeline_parallel_size=1"),
        (
            {
                "pipeline_parallel_size": 2,
                "num_layers_in_last_pipeline_stage": 2,
                "account_for_loss_in_pipeline_split": True,
            },
            "write their place into those numbers",
        ),
        ({"pipeline_parallel_size": 2, "layers_per_stage": (4,)}, "each of the 2 stages"),
        ({"layers_per_stage": (-1,)}, "layers_per_stage"),
        (
            {"account_for_embedding_in_pipeline_split": True, "layers_per_stage": (4,)},
            "drop the other",
        ),
    ],
)
def test_plans_that_cannot_be_are_refused(options, word):
    with pytest.raises(ConfigError, match=word):
        ParallelPlan(**options)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({}, "do not divide by 2 stages"),
        ({"virtual_pipeline_size": 3}, "do not divide by 6 stages"),
        ({"num_layers_in_first_pipeline_stage": 8}, "do not divide by the 1 stages"),
        ({"num_layers_in_first_pipeline_stage": 2, "virtual_pipeline_size": 2}, "2 chunks"),
        (
            {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 2},
            "4 in all, but the model has 7",
        ),
        ({"layers_per_stage": (3, 3)}, "6 in all, but the model has 7"),
    ],
)
def test_layers_that_a_plan_cannot_split_are_refused(options, word):
    with pytest.raises(ConfigError, match=word):
        stage_layers(ParallelPlan(pipeline_parallel_size=2, **options), 7, 0)


@pytest.mark.parametrize(
    ("padded", "plan", "word"),
    [
        # Ten rows in four chunks of two: the rows 4 and 5 would be nobody's.
        ((10,), {"context_parallel_size": 2}, "rows in the middle would belong to no rank"),
        ((9,), {"tensor_parallel_size": 2, "sequence_parallel": True}, "between 2 ranks"),
        ((9,), {"context_parallel_size": 2, "context_parallel_layout": "contiguous"}, "9 padded"),
        (
            (12,),
            {"context_parallel_size": 2, "tensor_parallel_size": 4, "sequence_parallel": True},
            "between 8 ranks",
        ),
    ],
)
def test_batches_that_a_plan_cannot_cut_are_refused(padded, plan, word):
    sequences = PackedSequences(lengths=(7,), padded_lengths=padded)
    with pytest.raises(ConfigError, match=word):
        RowLayout(plan=ParallelPlan(**plan), sequences=sequences)
    columns = PaddedSequences.from_lengths([7], padded[0], order="s_major", padding_side="right")
    with pytest.raises(ConfigError, match=f"{padded[0]} columns do not divide"):
        RowLayout(plan=ParallelPlan(**plan), sequences=columns)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: PackedSequences.pack([], ParallelPlan()), "at least one sequence"),
        (lambda: PackedSequences.pack([3, 0], ParallelPlan()), "leave empty ones out"),
        (lambda: PackedSequences(lengths=(5,), padded_lengths=(4,)), "room for 4 rows only"),
        (lambda: PackedSequences(lengths=(5,), padded_lengths=(5, 4)), "2 padded lengths"),
        (lambda: PackedSequences.from_cu_seqlens([5], [0, 4]), "different batches"),
        (lambda: PackedSequences.from_cu_seqlens([5], [5, 10]), "begin with 0"),
        (lambda: PackedSequences.from_cu_seqlens([5], [0, 8, 9, 10]), "or two if the last"),
        (
            lambda: PaddedSequences.from_lengths([5], 4, order="s_major", padding_side="right"),
            "there are 4",
        ),
        (
            lambda: PaddedSequences.from_attention_mask(np.array([[1, 0, 1]]), order="s_major"),
            "between the tokens of sequence 0",
        ),
        (
            lambda: PaddedSequences.from_attention_mask(np.array([[1], [0]]), order="s_major"),
            "a token in every row",
        ),
    ],
)
def test_sequences_that_cannot_lie_so_are_refused(make, word):
    with pytest.raises(SpanError, match=word):
        make()


def test_orders_and_sides_are_never_guessed():
    with pytest.raises(ConfigError, match="order='sbh'"):
        PaddedSequences.from_lengths([1], 1, order="sbh", padding_side="right")
    with pytest.raises(ConfigError, match="padding_side='both'"):
        PaddedSequences.from_lengths([1], 1, order="s_major", padding_side="both")
    with pytest.raises(ConfigError, match="total_padding='none'"):
        PackingConfig(total_padding="none")


def one_sequence(num_tokens: int = 7, **plan: int) -> RowLayout:
    made = ParallelPlan(**plan)
    return RowLayout(plan=made, sequences=PackedSequences.pack([num_tokens], made))


def test_records_that_do_not_belong_to_the_batch_are_refused():
    record, sequence = make_record(6), tokens(7)
    with pytest.raises(SpanError, match="pass all of the batch"):
        MicroBatch(layout=one_sequence(8), records=[record], token_ids=[sequence])
    with pytest.raises(SpanError, match="ends at position 6, its tokens at 5"):
        MicroBatch(layout=one_sequence(5), records=[record], token_ids=[sequence[:5]])
    with pytest.raises(TokenMismatchError, match=r"sequence 0: .*position 0 .*shifted by \+1"):
        MicroBatch(layout=one_sequence(), records=[record], token_ids=[[1, *sequence[:6]]])
    plan = ParallelPlan()
    two = RowLayout(plan=plan, sequences=PackedSequences.pack([7, 7], plan))
    other = RoutedExperts.from_rows(make_schema(num_experts=17), np.array(record.ids_TLK), sequence)
    with pytest.raises(SchemaMismatchError, match="record of sequence 1"):
        MicroBatch(layout=two, records=[record, other], token_ids=[sequence, sequence])


def test_ranks_and_outputs_that_do_not_fit_are_refused():
    batch = MicroBatch(layout=one_sequence(), records=[make_record(6)], token_ids=[tokens(7)])
    for name in ("tp_rank", "cp_rank", "pp_rank", "vp_stage"):
        for value in (-1, 1):
            with pytest.raises(ConfigError, match=rf"{name}={value} is not one of the 1 "):
                batch.rows_for(ParallelRank(**{name: value}))
            with pytest.raises(ConfigError, match=rf"{name}={value} is not one of the 1 "):
                batch.layout.places(ParallelRank(**{name: value}))
    wide = np.empty((7, 2, 2), np.int64)
    assert batch.rows_for(ParallelRank(), out=wide).ids_TLK is wide
    for out in (wide[:6], wide.astype(np.int32), np.asfortranarray(wide)):
        with pytest.raises(SchemaMismatchError, match=r"rows are int64 of shape \(7, 2, 2\)"):
            batch.rows_for(ParallelRank(), out=out)
    with pytest.raises(ConfigError, match="cp_rank=1 is not one of the 1 "):
        batch.check_input_ids(np.array(tokens(7)), 1)
    with pytest.raises(SpanError, match=r"shape \(1, 8\), this layout \(1, 7\)"):
        batch.check_input_ids(np.zeros(8, np.int64))


def test_tokens_cut_zigzag_do_not_pass_for_contiguous_ones():
    plan = ParallelPlan(context_parallel_size=2, context_parallel_layout="contiguous")
    layout = RowLayout(plan=plan, sequences=PackedSequences(lengths=(8,), padded_lengths=(8,)))
    batch = MicroBatch(layout=layout, records=[make_record(7)], token_ids=[tokens(8)])
    batch.check_input_ids(np.array(tokens(8)[:4]))
    with pytest.raises(TokenMismatchError, match="check context_parallel_layout"):
        batch.check_input_ids(np.array(tokens(8))[[0, 1, 6, 7]])


def test_rows_that_do_not_come_together_are_refused():
    layout = one_sequence(7, pipeline_parallel_size=2)
    batch = MicroBatch(layout=layout, records=[make_record(6)], token_ids=[tokens(7)])
    ranks = all_ranks(layout.plan)
    pieces = {rank: batch.rows_for(rank) for rank in ranks}

    def collect(given):
        return collect_records(layout, batch.schema, given, [tokens(7)])

    with pytest.raises(SpanError, match="position 0 has rows of some layers but not of layer 3"):
        collect({ranks[0]: pieces[ranks[0]]})
    short = replace(pieces[ranks[0]], ids_TLK=pieces[ranks[0]].ids_TLK[1:])
    with pytest.raises(SchemaMismatchError, match="the layout has 7 rows"):
        collect({ranks[0]: short})
    pieces[ranks[0]].ids_TLK[2] = 16
    with pytest.raises(RecordError, match="ids from 0 to 16"):
        collect(pieces)
    with pytest.raises(SpanError, match="lengths"):
        collect_records(layout, batch.schema, pieces, [tokens(6)])


def test_ranks_that_disagree_about_a_row_are_refused():
    layout = one_sequence(7, tensor_parallel_size=2)
    batch = MicroBatch(layout=layout, records=[make_record(6)], token_ids=[tokens(7)])
    pieces = {rank: batch.rows_for(rank) for rank in all_ranks(layout.plan)}
    [_, other] = pieces.values()
    other.ids_TLK[3, 0] = other.ids_TLK[3, 0, ::-1].copy()
    with pytest.raises(RecordError, match="different choices"):
        collect_records(layout, batch.schema, pieces, [tokens(7)])
