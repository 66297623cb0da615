"""Where the rows of records come to lie in a batch, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from routebook.errors import (
    RecordError,
    ReplayError,
    SchemaMismatchError,
    SpanError,
    TokenMismatchError,
)
from routebook.replay import RouteBatch, RouteSession, Sequences
from routebook.routes import Origin, RoutedExperts, RouteSchema
from tests.families import SERVED
from tests.replay.helpers import foreign_ids, logits_of, tokens

SCHEMA = RouteSchema(layer_ids=(1, 3), num_experts=300, top_k=3, num_hidden_layers=5)
LENGTHS = (5, 1, 7)


def tagged(sequence: int, length: int, start: int = 0) -> RoutedExperts:
    """Ids that say which sequence, position and layer they belong to; the last token has no row."""
    rows, layers = np.arange(start, length - 1), np.arange(2)
    tag_TL = 100 * sequence + 10 * rows[:, None] + 5 * layers[None]
    ids_TLK = tag_TL[:, :, None] + np.arange(3)
    token_ids = tokens(1, length, sequence)[0].numpy()
    return RoutedExperts.from_rows(SCHEMA, ids_TLK.astype(np.uint16), token_ids, start)


def sequences_of(lengths, width: int, left: bool) -> torch.Tensor:
    """An attention mask `[B, S]`."""
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for line, length in zip(mask, lengths, strict=True):
        line[width - length :] = 1 if left else line[width - length :]
        line[: length if not left else 0] = 1
    return mask


@pytest.mark.parametrize("left", [False, True])
def test_rows_of_a_padded_batch(left):
    mask = sequences_of(LENGTHS, 8, left)
    records = [tagged(0, 5), None, tagged(2, 7, start=2)]
    batch = RouteBatch.from_records(records, Sequences.padded(mask))
    expected = set()
    for b, (length, start) in {0: (5, 0), 2: (7, 2)}.items():
        first = 8 - length if left else 0
        for position in range(start, length - 1):
            row = 8 * b + first + position
            expected.add(row)
            for layer in range(2):
                tag = 100 * b + 10 * position + 5 * layer
                assert batch.ids_NLK[row, layer].tolist() == [tag, tag + 1, tag + 2]
    assert set(batch.forced_N.nonzero().flatten().tolist()) == expected
    assert torch.equal(batch.real_N, mask.flatten().bool())


def test_rows_of_a_packed_batch():
    batch = RouteBatch.from_records(
        [tagged(0, 5), tagged(1, 1), tagged(2, 7)], Sequences.packed([0, 5, 6, 13], 16)
    )
    assert batch.ids_NLK[[0, 3, 6, 11], 1, 0].tolist() == [5, 35, 205, 255]
    assert batch.forced_N.tolist() == [True] * 4 + [False] * 2 + [True] * 6 + [False] * 4
    assert batch.real_N.tolist() == [True] * 13 + [False] * 3


def test_positions_say_where_packed_sequences_begin():
    assert Sequences.from_positions([0, 1, 2, 0, 0, 1]).spans == ((0, 3), (3, 1), (4, 2))
    for wrong in ([1, 2, 3], [0, 1, 3, 0], [0, 1, 2, 5, 6]):
        with pytest.raises(ReplayError, match="position_ids of a packed batch"):
            Sequences.from_positions(wrong)


def test_absent_rows_are_native():
    origins = np.array([Origin.PREFILL, Origin.ABSENT, Origin.DECODE, Origin.ABSENT], np.uint8)
    whole = tagged(0, 5)
    record = RoutedExperts.from_rows(
        SCHEMA, whole.ids_TLK, tokens(1, 5, 0)[0].numpy(), origin_T=origins
    )
    batch = RouteBatch.from_records([record], Sequences.packed([0, 5], 5))
    assert batch.forced_N.tolist() == [True, False, True, False, False]


def test_rows_of_other_tokens_are_refused():
    input_ids = torch.stack([tokens(1, 7, 1)[0], tokens(1, 7, 2)[0]])
    sequences = Sequences.padded(torch.ones(2, 7))
    records = [tagged(1, 7), tagged(2, 7)]
    RouteBatch.from_records(records, sequences, input_ids)
    with pytest.raises(TokenMismatchError):
        RouteBatch.from_records(records[::-1], sequences, input_ids)
    with pytest.raises(TokenMismatchError):
        RouteBatch.from_records(records, sequences, input_ids.roll(1, dims=1))


def test_a_record_that_is_too_long_is_refused():
    with pytest.raises(SpanError, match=r"record 0 ends at position 6.*has 5 tokens; truncate"):
        RouteBatch.from_records([tagged(2, 7)], Sequences.packed([0, 5], 5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids: ids.__setitem__((2, 1, 0), 300), "row 2 of the batch, layer 3.*none of 300"),
        (lambda ids: ids.__setitem__((2, 1, 0), -2), "none of 300 experts"),
        (lambda ids: ids.__setitem__((2, 1), 7), "name an expert twice"),
        (lambda ids: ids.__setitem__((2, 0, 1), -1), "-1 in part"),
    ],
)
def test_ids_that_no_router_chose_are_refused(change, words):
    ids = foreign_ids(SCHEMA, 6, 1)
    RouteBatch.from_ids(SCHEMA, ids)
    change(ids)
    with pytest.raises(SchemaMismatchError, match=words):
        RouteBatch.from_ids(SCHEMA, ids)


def test_shapes_that_do_not_fit_are_refused():
    ids = foreign_ids(SCHEMA, 6, 1)
    for wrong in (ids[:, :1], ids[..., :2], ids.float(), ids[0]):
        with pytest.raises(SchemaMismatchError, match="shape"):
            RouteBatch.from_ids(SCHEMA, wrong)
    with pytest.raises(SchemaMismatchError, match="5 flags for 6 rows"):
        RouteBatch.from_ids(SCHEMA, ids, torch.ones(5))
    with pytest.raises(ReplayError, match="padding has a route"):
        RouteBatch.from_ids(SCHEMA, ids, torch.tensor([1, 1, 1, 1, 1, 0]))
    with pytest.raises(ReplayError, match="1 records for 2 sequences"):
        RouteBatch.from_records([tagged(0, 5)], Sequences.packed([0, 5, 6], 6))
    with pytest.raises(SchemaMismatchError, match="0 schemas"):
        RouteBatch.from_records([None], Sequences.packed([0, 5], 5))


@pytest.mark.parametrize("mask", [[[1, 0, 1]], [[0, 2, 1]], [1, 1]])
def test_masks_that_say_no_position_are_refused(mask):
    with pytest.raises(ReplayError):
        Sequences.padded(torch.tensor(mask))


@pytest.mark.parametrize("borders", [[0], [1, 3], [0, 3, 3], [0, 3, 2], [0, 9]])
def test_borders_that_do_not_fit_are_refused(borders):
    with pytest.raises(ReplayError, match="cu_seqlens"):
        Sequences.packed(borders, 8)


@pytest.fixture(scope="module")
def model():
    return SERVED["qwen3_moe"].build()


@pytest.fixture
def session(model):
    session = RouteSession(model)
    yield session
    session.close()


@pytest.fixture
def alone(model, session):
    """Sequences of several lengths, each with the record and logits of a forward of its own."""
    found = []
    for seed, length in enumerate(LENGTHS):
        input_ids = tokens(1, length, seed)
        with torch.no_grad(), session.recording() as forwards:
            logits = logits_of(model, input_ids)
        found.append((input_ids[0], forwards[0].records()[0], logits[0]))
    return found


@torch.no_grad()
@pytest.mark.parametrize("left", [False, True])
def test_a_padded_call_is_read_by_its_attention_mask(model, session, alone, left):
    mask = sequences_of(LENGTHS, 9, left)
    input_ids = torch.full((3, 9), 4)
    for line, place, (ids, _, _) in zip(input_ids, mask, alone, strict=True):
        line[place.bool()] = ids
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    with session.forward([record for _, record, _ in alone]) as forwards:
        logits = logits_of(model, input_ids, attention_mask=mask, position_ids=position_ids)
    real_N = mask.flatten().bool()
    wanted = np.concatenate([record.ids_TLK for _, record, _ in alone])
    assert np.array_equal(forwards[0].topk_ids[real_N].numpy(), wanted)
    assert forwards[0].num_native == 0
    for line, place, (_, _, expected) in zip(logits, mask, alone, strict=True):
        torch.testing.assert_close(line[place.bool()], expected, rtol=1e-4, atol=1e-4)
    # Padding is nobody's load.
    counts = forwards[0].expert_counts()
    assert counts.sum(-1).tolist() == [sum(LENGTHS) * session.schema.top_k] * len(counts)
    assert torch.equal(
        counts[0], torch.from_numpy(wanted[:, 0].ravel()).int().bincount(minlength=12)
    )
    assert [r == a for r, (_, a, _) in zip(forwards[0].records(), alone, strict=True)] == [True] * 3


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 3])
def test_a_packed_call_is_read_by_its_positions(model, session, alone, padding):
    input_ids = torch.cat([ids for ids, _, _ in alone] + [torch.full((padding,), 4)])[None]
    lengths = [*LENGTHS, *([padding] if padding else [])]
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    inputs = {"position_ids": position_ids}
    if padding:
        inputs["attention_mask"] = (torch.arange(input_ids.shape[1]) < sum(LENGTHS)).long()[None]
    with session.forward([record for _, record, _ in alone]) as forwards:
        logits_of(model, input_ids, **inputs)
    wanted = np.concatenate([record.ids_TLK for _, record, _ in alone])
    assert np.array_equal(forwards[0].topk_ids[: sum(LENGTHS)].numpy(), wanted)
    assert forwards[0].token_mask.sum() == sum(LENGTHS)


@torch.no_grad()
def test_calls_that_do_not_fit_the_routes_are_refused(model, session, alone):
    (ids, record, _), (_, other, _), _ = alone
    for routes, inputs, kind, words in (
        ([record, other], {}, ReplayError, "2 records for a batch of 1 sequences"),
        ([record], {"attention_mask": torch.ones(1, 1, 5, 5)}, ReplayError, "attention mask is"),
        (
            foreign_ids(session.schema, 4, 0),
            {},
            SchemaMismatchError,
            "4 rows in a forward of 1 x 5",
        ),
        (foreign_ids(SCHEMA, 5, 0)[..., :1], {}, SchemaMismatchError, "shape"),
        (
            RouteBatch.from_ids(SCHEMA, foreign_ids(SCHEMA, 5, 0)),
            {},
            SchemaMismatchError,
            "the model has",
        ),
    ):
        with pytest.raises(kind, match=words), session.forward(routes):
            logits_of(model, ids[None], **inputs)
    with pytest.raises(TokenMismatchError), session.forward([record]):
        logits_of(model, ids[None].flip(-1))
    cache = model(input_ids=ids[None], use_cache=True).past_key_values
    with pytest.raises(ReplayError, match="KV cache of 5 tokens"), session.forward([record]):
        model(input_ids=ids[None], past_key_values=cache)
    with pytest.raises(RecordError), session.forward(foreign_ids(session.schema, 5, 0) * 0):
        logits_of(model, ids[None])


@torch.no_grad()
def test_several_packed_lines_are_read_in_order(model, session, alone):
    lines = [torch.cat([alone[0][0], alone[1][0], alone[1][0]]), alone[2][0]]
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 0], [0, 1, 2, 3, 4, 5, 6]])
    records = [alone[0][1], None, alone[1][1], alone[2][1]]
    with session.forward(records) as forwards:
        logits_of(model, torch.stack(lines), position_ids=positions)
    taken = forwards[0].topk_ids.numpy()
    assert np.array_equal(taken[:5], records[0].ids_TLK)
    assert np.array_equal(taken[6:], np.concatenate([records[2].ids_TLK, records[3].ids_TLK]))
    assert forwards[0].num_native == 1


@torch.no_grad()
def test_the_model_s_own_balance_loss_sees_neither_session_nor_padding(model, session, alone):
    mask = sequences_of(LENGTHS, 9, left=True)
    losses = []
    for filler in (4, 5):
        input_ids = torch.full((3, 9), filler)
        for line, place, (ids, _, _) in zip(input_ids, mask, alone, strict=True):
            line[place.bool()] = ids
        inputs = {"input_ids": input_ids, "attention_mask": mask, "output_router_logits": True}
        losses.append(model(**inputs, use_cache=False).aux_loss)
        with session.forward([record for _, record, _ in alone]):
            losses.append(model(**inputs, use_cache=False).aux_loss)
    assert losses[0] > 0
    assert torch.equal(losses[0], losses[1])
    torch.testing.assert_close(losses[2], losses[0])
    assert torch.equal(losses[2], losses[3])
