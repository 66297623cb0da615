"""Aligned records against a dictionary of what each forward pass computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routebook.errors import RecordError, SchemaMismatchError, SpanError, TokenMismatchError
from routebook.routes import RoutedExperts, Turn, align, join_turns, shared_prefix
from tests.routes.strategies import make_record, make_schema, rows_and_tokens, tokens
from tests.routes.tagged_rows import read_tag, tagged_record, tagged_schema

SCHEMA = tagged_schema((1, 2), 3)


def owners(record: RoutedExperts) -> dict[int, int]:
    """Position -> who computed its row, for every row that exists; each must say its own position."""
    found = {}
    for row in np.flatnonzero(record.valid_T).tolist():
        for layer, ids_K in zip(record.schema.layer_ids, record.ids_TLK[row], strict=True):
            owner, position, tagged_layer = read_tag(ids_K)
            assert (position, tagged_layer) == (record.start + row, layer)
            found[position] = owner
    return found


@dataclass
class Engine:
    """Runs turns over a growing sequence and notes who computed each position first."""

    tokens: list[int] = field(default_factory=list)
    computed: dict[int, int] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)

    def turn(
        self, num_new: int, start: int, absent: frozenset[int] = frozenset(), lost: int = 0
    ) -> None:
        """A request over all tokens so far and `num_new` more; `lost` rows at its end are not returned."""
        owner = len(self.turns)
        self.tokens += [1000 + 37 * len(self.tokens) + owner for _ in range(num_new)]
        stop = max(start, len(self.tokens) - 1 - lost)
        record = tagged_record(
            SCHEMA, owner, self.tokens, (start, stop), absent=absent, version=owner
        )
        for position in set(range(start, stop)) - absent:
            self.computed.setdefault(position, owner)
        self.turns.append(Turn(record=record, num_tokens=len(self.tokens)))


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    engine = Engine()
    for _ in range(draw(st.integers(1, 4))):
        before = len(engine.tokens)
        starts = (0, max(before - 1, 0), before, draw(st.integers(0, before)))
        absent = draw(st.frozensets(st.integers(0, before + 6), max_size=4))
        num_new = draw(st.integers(1, 6))
        start = min(draw(st.sampled_from(starts)), before + num_new - 1)
        engine.turn(num_new, start, absent, lost=draw(st.sampled_from((0, 0, 0, 1, 20))))
    return engine


@given(engines(), st.integers(0, 3))
def test_every_position_has_its_earliest_row_or_none(engine, num_tool_tokens):
    sequence = engine.tokens + [7] * num_tool_tokens
    joined = join_turns(engine.turns, sequence)
    assert (joined.start, joined.stop) == (0, len(sequence))
    assert owners(joined) == engine.computed
    joined.check_tokens(sequence)
    for span in joined.provenance:
        for position in range(span.start, span.stop):
            assert span.weight_version == engine.computed[position]


@given(engines(), st.data())
def test_truncation_at_every_cut_keeps_the_rows_before_it(engine, data):
    cut = data.draw(st.integers(0, len(engine.tokens)))
    joined = join_turns(engine.turns, engine.tokens[:cut], truncate=True)
    assert joined == join_turns(engine.turns, engine.tokens).truncate(cut)


@given(rows_and_tokens())
def test_align_is_the_record_among_absent_rows(made):
    record, token_ids, _ = made
    aligned = align(record, token_ids)
    assert (aligned.start, aligned.stop) == (0, len(token_ids))
    assert aligned.slice(record.start, record.stop) == record
    assert aligned.valid_T.sum() == record.valid_T.sum()


def test_boundary_row_is_of_the_turn_that_had_its_token_as_input():
    engine = Engine()
    engine.turn(11, 0)
    engine.turn(4, 10)
    joined = join_turns(engine.turns, [*engine.tokens, 7])
    assert owners(joined) == {**dict.fromkeys(range(10), 0), **dict.fromkeys(range(10, 14), 1)}
    assert joined.valid_T.tolist() == [True] * 14 + [False] * 2


def test_an_increment_without_the_boundary_row_leaves_it_absent():
    engine = Engine()
    engine.turn(11, 0)
    engine.turn(4, 11)
    assert np.flatnonzero(~join_turns(engine.turns, engine.tokens).valid_T).tolist() == [10, 14]


def test_a_resumed_request_is_not_computed_twice():
    """A resumed request returns its whole history again: neither appended behind it, nor put in its place."""
    engine = Engine()
    engine.turn(8, 0)
    engine.turn(5, 0)
    first, second = (turn.record for turn in engine.turns)
    with pytest.raises(SpanError, match="begins at position 0"):
        first.append(second)
    assert owners(join_turns(engine.turns, engine.tokens))[3] == 0


def test_a_turn_aborted_before_its_first_row_adds_nothing():
    engine = Engine()
    engine.turn(6, 0)
    engine.turn(3, 5, lost=20)
    engine.turn(2, 5)
    joined = owners(join_turns(engine.turns, engine.tokens))
    assert joined == {**dict.fromkeys(range(5), 0), **dict.fromkeys(range(5, 10), 2)}


def test_a_row_of_the_last_sampled_token_is_refused():
    with pytest.raises(
        SpanError, match=r"rows up to position 5.* filler; truncate the record to 5"
    ):
        Turn(record=make_record(6), num_tokens=6)
    assert Turn(record=make_record(6), num_tokens=7).num_tokens == 7


@pytest.mark.parametrize(
    ("edit", "position", "shift"),
    [
        (lambda t: [*t[1:], 5], 0, "shifted by -1"),
        (lambda t: [5, *t], 0, r"shifted by \+1"),
        (lambda t: t[:3] + t[4:] + [5], 3, "shifted by -1"),
        (lambda t: [*t[:3], 5, *t[3:]], 3, r"shifted by \+1"),
        (lambda t: [*t[:4], t[5], t[4], *t[6:]], 4, ""),
    ],
)
def test_moved_tokens_are_found_with_position_and_shift(edit, position, shift):
    sequence = tokens(9)
    with pytest.raises(TokenMismatchError, match=f"row at position {position} .*{shift}"):
        align(make_record(8), edit(sequence))


def test_a_history_tokenised_anew_names_turn_and_position():
    engine = Engine()
    engine.turn(6, 0)
    history = [*engine.tokens[:4], 1, 2, *engine.tokens[5:]]
    later = tagged_record(SCHEMA, 1, [*history, 8, 9], (0, len(history) + 1))
    turns = [*engine.turns, Turn(record=later, num_tokens=len(history) + 2)]
    with pytest.raises(TokenMismatchError, match="turn 0: the row at position 4"):
        join_turns(turns, [*history, 8, 9])


@given(engines(), st.data())
def test_a_branch_shares_the_rows_before_it_leaves(engine, data):
    turn = engine.turns[-1]
    fork = data.draw(st.integers(0, len(engine.tokens)))
    branch = engine.tokens[:fork] + [3] * data.draw(st.integers(1, 4))
    shared = shared_prefix(turn, branch)
    kept = {p: owner for p, owner in owners(turn.record).items() if p < fork}
    assert owners(shared.record) == kept
    own = tagged_record(SCHEMA, 9, branch, (max(fork - 1, 0), len(branch) - 1))
    joined = join_turns([shared, Turn(record=own, num_tokens=len(branch))], branch)
    assert owners(joined) == dict.fromkeys(range(own.start, own.stop), 9) | kept
    if turn.record.num_rows and fork < turn.record.stop:
        with pytest.raises((TokenMismatchError, SpanError)):
            join_turns([turn, Turn(record=own, num_tokens=99)], branch)


def test_a_prompt_is_stored_once_for_its_completions():
    prompt = [10, 11, 12, 13]
    computed_it = Turn(
        record=tagged_record(SCHEMA, 0, [*prompt, 50, 51], (0, 5)), num_tokens=len(prompt) + 2
    )
    completion = [*prompt, 60, 61, 62]
    own = Turn(record=tagged_record(SCHEMA, 1, completion, (4, 6)), num_tokens=len(completion))
    joined = join_turns([shared_prefix(computed_it, completion), own], completion)
    assert owners(joined) == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1}


def test_turns_out_of_order_are_refused():
    engine = Engine()
    engine.turn(6, 0)
    engine.turn(4, 0)
    with pytest.raises(SpanError, match="turn 1 ended at 6 tokens, one before it at 10"):
        join_turns(engine.turns[::-1], engine.tokens)


def test_turns_without_rows_may_stand_anywhere():
    engine = Engine()
    engine.turn(6, 0)
    engine.turn(4, 0)
    other = [1, *engine.tokens[1:]]
    nothing = shared_prefix(Turn(record=engine.turns[1].record, num_tokens=10), other)
    assert nothing.record.num_rows == 0
    joined = join_turns([engine.turns[0], nothing, engine.turns[1]], engine.tokens)
    assert owners(joined) == engine.computed


def test_an_increment_shares_nothing_behind_other_tokens():
    record = tagged_record(SCHEMA, 0, [1, 2, 3, 4, 5], (2, 4))
    turn = Turn(record=record, num_tokens=5)
    assert shared_prefix(turn, [1, 2, 3, 4, 5]).record == record
    assert shared_prefix(turn, [9, 2, 3, 4, 5]).record.num_rows == 0
    assert shared_prefix(turn, [1]).record.num_rows == 0


def test_rows_behind_the_last_token_are_not_dropped_in_silence():
    record, sequence = make_record(8), tokens(9)
    with pytest.raises(SpanError, match="rows up to position 7, but there are 5 tokens"):
        align(record, sequence[:5])
    assert align(record, sequence[:5], truncate=True) == record.truncate(5)
    with pytest.raises(TokenMismatchError):
        align(record, sequence[1:6], truncate=True)


def test_turns_of_other_models_and_no_turns_are_refused():
    other = RoutedExperts.from_rows(
        make_schema(num_experts=17), np.array(make_record(6).ids_TLK), tokens(7)
    )
    turns = [Turn(record=record, num_tokens=7) for record in (make_record(6), other)]
    with pytest.raises(SchemaMismatchError, match="turn 1"):
        join_turns(turns, tokens(7))
    with pytest.raises(RecordError, match="pass at least one"):
        join_turns([], tokens(3))
