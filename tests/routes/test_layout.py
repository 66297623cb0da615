"""Rows of every rank by their tags: each is where the layout says, once, and nothing else is there."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routebook.errors import (
    ConfigError,
    SchemaMismatchError,
    TokenMismatchError,
)
from routebook.routes import (
    MicroBatch,
    PackedSequences,
    PackingConfig,
    PaddedSequences,
    ParallelPlan,
    ParallelRank,
    RankRows,
    RoutedExperts,
    RouteSchema,
    RowLayout,
    align,
    check_moe_layers,
    collect_records,
    moe_layer_ids,
)
from tests.routes.layout_cases import TAG, all_ranks, tags
from tests.routes.strategies import make_schema, random_ids, tokens
from tests.routes.tagged_rows import read_tag, tagged_record, tagged_schema


@st.composite
def plans(draw: st.DrawFn, num_layers: int) -> ParallelPlan:
    tp = draw(st.sampled_from((1, 2, 3, 4)))
    pp, vpp = draw(st.sampled_from(((1, 1), (2, 1), (3, 1), (2, 2))))
    cuts = sorted(
        draw(st.lists(st.integers(0, num_layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1))
    )
    return ParallelPlan(
        tensor_parallel_size=tp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        context_parallel_size=draw(st.sampled_from((1, 2, 3, 4))),
        context_parallel_layout=draw(st.sampled_from(("zigzag", "contiguous"))),
        pipeline_parallel_size=pp,
        virtual_pipeline_size=vpp,
        layers_per_stage=tuple(np.diff([0, *cuts, num_layers]).tolist()),
    )


@st.composite
def arrangements(
    draw: st.DrawFn, lengths: list[int], plan: ParallelPlan
) -> PackedSequences | PaddedSequences:
    multiple = plan.sequence_multiple
    if draw(st.booleans()):
        least = plan.context_multiple if plan.cuts_zigzag else 1
        config = PackingConfig(
            sequence_multiple=draw(st.sampled_from((None, least, 3 * multiple))),
            total_multiple=multiple * draw(st.sampled_from((1, 5))),
            total_padding=draw(st.sampled_from(("last_sequence", "own_sequence"))),
        )
        return PackedSequences.pack(lengths, plan, config)
    num_columns = -(-max(lengths) // multiple) * multiple
    return PaddedSequences(
        lengths=tuple(lengths),
        starts=tuple(draw(st.integers(0, num_columns - n)) for n in lengths),
        num_columns=num_columns,
        order=draw(st.sampled_from(("s_major", "b_major"))),
    )


@st.composite
def micro_batches(draw: st.DrawFn) -> MicroBatch:
    layers = sorted(draw(st.sets(st.integers(0, 5), min_size=1)))
    schema = tagged_schema(tuple(layers), 6)
    plan = draw(plans(6))
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    token_ids = [[100 * i + p for p in range(n)] for i, n in enumerate(lengths)]
    records = []
    for i, n in enumerate(lengths):
        span = sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))
        absent = draw(st.frozensets(st.integers(0, n), max_size=3))
        records.append(tagged_record(schema, i, token_ids[i], tuple(span), absent=absent))
    layout = RowLayout(plan=plan, sequences=draw(arrangements(lengths, plan)))
    return MicroBatch(layout=layout, records=records, token_ids=token_ids)


@given(micro_batches(), st.booleans())
@settings(max_examples=200)
def test_tagged_ids_survive_packing_and_all_cuts_and_come_back(batch, widen):
    plan, seen = batch.layout.plan, Counter()
    pieces: dict[ParallelRank, RankRows] = {}
    for rank in all_ranks(plan):
        rows = pieces[rank] = batch.rows_for(rank, widen=widen)
        sequence_T, position_T = batch.layout.places(rank)
        assert rows.padding_T.tolist() == (sequence_T < 0).tolist()
        for row, layer in product(np.flatnonzero(rows.valid_T), range(len(rows.layer_ids))):
            tag = read_tag(rows.ids_TLK[row, layer])
            assert tag == (sequence_T[row], position_T[row], rows.layer_ids[layer])
            seen[tag] += 1
    copies = 1 if plan.sequence_parallel else plan.tensor_parallel_size
    expected = {
        (i, record.start + int(row), layer): copies
        for i, record in enumerate(batch.records)
        for row in np.flatnonzero(record.valid_T)
        for layer in record.schema.layer_ids
    }
    assert seen == expected
    back = collect_records(batch.layout, batch.schema, pieces, batch.token_ids)
    for record, original, sequence in zip(back, batch.records, batch.token_ids, strict=True):
        aligned = align(original, sequence)
        assert record.valid_T.tolist() == aligned.valid_T.tolist()
        assert record.ids_TLK.tolist() == aligned.ids_TLK.tolist()


@given(micro_batches())
def test_rows_that_are_not_valid_are_no_experts(batch):
    rank = all_ranks(batch.layout.plan)[-1]
    wide, narrow = batch.rows_for(rank), batch.rows_for(rank, widen=False)
    assert (wide.ids_TLK.dtype, narrow.ids_TLK.dtype) == (np.int64, batch.schema.dtype)
    assert (wide.ids_TLK[~wide.valid_T] == -1).all()
    assert (wide.ids_TLK[wide.valid_T] >= 0).all()
    assert (narrow.ids_TLK[~narrow.valid_T] == batch.schema.absent).all()
    assert (narrow.ids_TLK[wide.valid_T] == wide.ids_TLK[wide.valid_T]).all()
    assert not (wide.valid_T & wide.padding_T).any()


@given(micro_batches(), st.data())
def test_input_ids_cut_by_the_same_plan_are_accepted_and_others_named(batch, data):
    plan = batch.layout.plan
    cp_rank = data.draw(st.integers(0, plan.context_parallel_size - 1))
    sequence_BS, position_BS = batch.layout.context_places(cp_rank)
    input_ids = np.where(sequence_BS < 0, 99_999, 100 * sequence_BS + position_BS)
    batch.check_input_ids(input_ids, cp_rank)
    real = np.argwhere(sequence_BS >= 0)
    if len(real):
        b, s = real[data.draw(st.integers(0, len(real) - 1))].tolist()
        input_ids[b, s] += 1
        with pytest.raises(
            TokenMismatchError,
            match=rf"\[{b}, {s}\].*position {position_BS[b, s]} of sequence {sequence_BS[b, s]} ",
        ):
            batch.check_input_ids(input_ids, cp_rank)


def test_rows_of_two_packed_sequences_between_four_ranks():
    plan = ParallelPlan(tensor_parallel_size=2, sequence_parallel=True, context_parallel_size=2)
    layout = RowLayout(plan=plan, sequences=PackedSequences.pack([5, 9], plan))
    found = {
        (rank.cp_rank, rank.tp_rank): [
            divmod(t, TAG) if t >= 0 else None for t in tags(layout, rank)
        ]
        for rank in all_ranks(plan)
    }
    assert found == {
        (0, 0): [(0, 0), (0, 1), None, None, (1, 0), (1, 1)],
        (0, 1): [(1, 2), (1, 3), None, None, None, None],
        (1, 0): [(0, 2), (0, 3), (0, 4), None, (1, 4), (1, 5)],
        (1, 1): [(1, 6), (1, 7), (1, 8), None, None, None],
    }


def test_padding_of_the_whole_can_be_a_sequence_of_its_own():
    """Each rank then has its part of that padding last, and no sequence is cut in another way than without."""
    plan = ParallelPlan(context_parallel_size=2)
    config = PackingConfig(total_multiple=20, total_padding="own_sequence")
    packed = PackedSequences.pack([5, 3], plan, config)
    assert packed.cu_seqlens_padded.tolist() == [0, 8, 12, 20]
    layout = RowLayout(plan=plan, sequences=packed)
    assert tags(layout, ParallelRank()) == [0, 1, -1, -1, TAG, -1, -1, -1, -1, -1]
    in_last = PackedSequences.pack([5, 3], plan, PackingConfig(total_multiple=20))
    assert in_last.cu_seqlens_padded.tolist() == [0, 8, 20]
    last = RowLayout(plan=plan, sequences=in_last)
    assert tags(last, ParallelRank()) == [0, 1, -1, -1, TAG, TAG + 1, TAG + 2, -1, -1, -1]


def test_one_line_without_padding_between_its_sequences_is_cut_as_a_whole():
    plan = ParallelPlan(context_parallel_size=2, context_parallel_layout="contiguous")
    config = PackingConfig(sequence_multiple=1, total_multiple=12, total_padding="own_sequence")
    packed = PackedSequences.pack([5, 3], plan, config)
    assert packed.cu_seqlens_padded.tolist() == [0, 5, 8, 12]
    layout = RowLayout(plan=plan, sequences=packed)
    assert tags(layout, ParallelRank()) == [0, 1, 2, 3, 4, TAG]
    assert tags(layout, ParallelRank(cp_rank=1)) == [TAG + 1, TAG + 2, -1, -1, -1, -1]


@pytest.mark.parametrize("total_padding", ["last_sequence", "own_sequence"])
def test_cu_seqlens_of_the_trainer_give_the_same_layout(total_padding):
    plan = ParallelPlan(context_parallel_size=4)
    config = PackingConfig(total_multiple=72, total_padding=total_padding)
    packed = PackedSequences.pack([1, 17, 8], plan, config)
    assert packed.cu_seqlens.tolist() == [0, 1, 18, 26]
    assert packed.num_rows == 72
    assert PackedSequences.from_cu_seqlens([1, 17, 8], packed.cu_seqlens_padded) == packed


def test_fp8_padding():
    plan = ParallelPlan(tensor_parallel_size=3, context_parallel_size=2)
    packed = PackedSequences.pack([1, 50], plan, PackingConfig.fp8(plan))
    # 3 * 2 * 2 = 12: sequences of multiples of lcm(16, 12), all together of 128 * 12.
    assert packed.padded_lengths == (48, 1536 - 48)


@pytest.mark.parametrize(("order", "axes"), [("s_major", (1, 0, 2, 3)), ("b_major", (0, 1, 2, 3))])
def test_batch_dimension_is_flattened_as_the_model_does(order, axes):
    schema = tagged_schema((0, 1), 2)
    mask = np.array([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 0]])
    token_ids = [list(range(n)) for n in mask.sum(axis=1)]
    records = [tagged_record(schema, i, t, (0, len(t))) for i, t in enumerate(token_ids)]
    layout = RowLayout(
        plan=ParallelPlan(), sequences=PaddedSequences.from_attention_mask(mask, order=order)
    )
    rows = MicroBatch(layout=layout, records=records, token_ids=token_ids).rows_for(ParallelRank())
    dense_BSLK = np.full((*mask.shape, 2, 2), -1)
    for record, row, dense_SLK in zip(records, mask, dense_BSLK, strict=True):
        dense_SLK[row == 1] = record.ids_TLK
    assert rows.ids_TLK.tolist() == dense_BSLK.transpose(axes).reshape(-1, 2, 2).tolist()


def test_padding_sides():
    for side, starts in (("left", (3, 0)), ("right", (0, 0))):
        made = PaddedSequences.from_lengths([1, 4], 4, order="b_major", padding_side=side)
        assert made.starts == starts


@pytest.mark.parametrize("num_experts", [255, 256, 257, 512])
def test_largest_ids_are_experts_and_not_marks(num_experts):
    schema = make_schema(num_experts=num_experts, layer_ids=(0,))
    ids = np.full((3, 1, 2), [num_experts - 1, 0], schema.dtype)
    record = RoutedExperts.from_rows(schema, ids, tokens(4))
    layout = RowLayout(
        plan=ParallelPlan(), sequences=PackedSequences(lengths=(4,), padded_lengths=(5,))
    )
    batch = MicroBatch(layout=layout, records=[record], token_ids=[tokens(4)])
    for rows in (batch.rows_for(ParallelRank()), batch.rows_for(ParallelRank(), widen=False)):
        assert rows.ids_TLK[:3].tolist() == [[[num_experts - 1, 0]]] * 3
        assert rows.valid_T.tolist() == [True] * 3 + [False] * 2
        assert rows.padding_T.tolist() == [False] * 4 + [True]


def test_layers_of_virtual_stages_with_dense_first_layers():
    plan = ParallelPlan(pipeline_parallel_size=2, virtual_pipeline_size=2)
    schema = RouteSchema(
        layer_ids=moe_layer_ids(16, [0] * 3 + [1] * 13),
        num_experts=8,
        top_k=2,
        num_hidden_layers=16,
    )
    record = RoutedExperts.from_rows(schema, random_ids(schema, 1, 0), [1, 2])
    layout = RowLayout(plan=plan, sequences=PackedSequences.pack([2], plan))
    batch = MicroBatch(layout=layout, records=[record], token_ids=[[1, 2]])
    layer_ids = {
        (p, v): batch.rows_for(ParallelRank(pp_rank=p, vp_stage=v)).layer_ids
        for p, v in product(range(2), range(2))
    }
    assert layer_ids == {
        (0, 0): (3,),
        (0, 1): (8, 9, 10, 11),
        (1, 0): (4, 5, 6, 7),
        (1, 1): (12, 13, 14, 15),
    }


def test_moe_layers_of_the_trainer_are_compared():
    assert moe_layer_ids(5, 2) == (0, 2, 4)
    schema = make_schema()
    check_moe_layers(schema, 4, [0, 1, 0, 1])
    for num_layers, freq in ((4, [1, 0, 1, 0]), (4, 1), (5, [0, 1, 0, 1, 0])):
        with pytest.raises(SchemaMismatchError, match="moe_layer_freq shifts layers"):
            check_moe_layers(schema, num_layers, freq)
    for freq in (0, [0, 1], [0, 1, 2, 1]):
        with pytest.raises(ConfigError, match="moe_layer_freq"):
            moe_layer_ids(4, freq)
