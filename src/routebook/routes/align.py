"""From the records of an engine to one row for every token of a trainer's sequence.

Row `t` was computed while the token at position `t` was the input. So a sequence of N tokens has N rows, of which
some are absent: the last one, unless generation went on behind it; those that nobody asked the engine for; tokens of
a tool that no engine has seen yet. An absent row stays absent: none is made up, copied from a neighbour, or moved.

A trajectory of several turns:

    position      0 ......... 7   8   9  10  11  12  13  14  15
    turn 1        P P P P P P P P C   C   C                          11 tokens, rows [0, 10)
    turn 2        (history) ................. U   U   C   C          15 tokens, rows [10, 14) or [0, 14)
    tool output                                               U      16 tokens
    rows from     1 1 1 1 1 1 1 1 1   1   2   2   2   2   -   -

Position 10 is the boundary: its token was sampled last in turn 1, and was an input first in turn 2.

Legend of shape suffixes: T = rows of a record, N = tokens of the sequence, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routebook.errors import SchemaMismatchError, SpanError, TokenMismatchError
from routebook.routes.provenance import ABSENT, rows_of_provenance
from routebook.routes.record import RoutedExperts, RouteIds
from routebook.routes.token_hash import TokenIds, as_token_ids, token_hashes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """What an engine returned for one request of a trajectory: a turn, an aborted one, or a part that was resumed.

    Raises:
        SpanError: there is a row for the last token of the turn.
    """

    record: RoutedExperts
    """Its rows: from position 0 on, or an increment that begins later. Aborted turns may have none."""

    num_tokens: int
    """Tokens of the sequence when the turn ended, from position 0 on and with those that it sampled."""

    def __post_init__(self) -> None:
        if self.record.stop > max(self.num_tokens - 1, 0):
            raise SpanError(
                f"a turn of {self.num_tokens} tokens has rows up to position {self.record.stop - 1},"
                " but its last token was never an input, so that row is a filler; truncate the record"
                f" to {max(self.num_tokens - 1, 0)}, or correct num_tokens"
            )


def align(record: RoutedExperts, token_ids: TokenIds, *, truncate: bool = False) -> RoutedExperts:
    """One row for every token of a sequence that one request computed.

    Args:
        record: rows of the request; they may begin behind a prompt offset.
        token_ids: all tokens that the trainer uses, from position 0 on.
        truncate: the trainer cut the sequence short, so rows of the tokens behind the cut are dropped. Without it
            they are an error.

    Returns:
        A record of exactly the positions `[0, N)`; positions that `record` does not cover are absent.

    Raises:
        SpanError: rows behind the last token, and `truncate` was not given.
        TokenMismatchError: the rows were computed for other tokens; names the position and the shift.
    """
    return _join([record], token_ids, truncate)


def join_turns(
    turns: Sequence[Turn], token_ids: TokenIds, *, truncate: bool = False
) -> RoutedExperts:
    """One row for every token of a trajectory, whether its turns carry all rows so far or increments.

    A position that several turns computed keeps the earliest row: the sampled token's log-probability came from that
    forward, with those weights. A later turn only fills what the earlier ones left absent.

    Args:
        turns: in the order in which they ran. For a turn whose tokens are not all in this sequence, such as one of
            another branch, pass :func:`shared_prefix` of it.
        token_ids: all tokens of the trajectory, from position 0 on, tool outputs behind the last turn included.
        truncate: as for :func:`align`.

    Returns:
        A record of exactly the positions `[0, N)`.

    Raises:
        SchemaMismatchError: turns of different models.
        SpanError: no turn, turns that are out of order, or rows behind the last token without `truncate`.
        TokenMismatchError: a turn was computed for other tokens, as when a history was tokenised anew; names turn and
            position.
    """
    if not turns:
        raise SpanError("no turns to join; pass at least one")
    _check_order(turns, len(token_ids))
    return _join([turn.record for turn in turns], token_ids, truncate)


def shared_prefix(turn: Turn, token_ids: TokenIds) -> Turn:
    """The part of a turn that also belongs to another sequence: a shared prompt, or a trajectory that branched.

    A row depends on its own token and those before it, so rows up to the first token that differs are the other
    sequence's as well.

    Args:
        turn: of another sequence with the same beginning.
        token_ids: all tokens of this sequence, from position 0 on.

    Returns:
        The rows up to the first difference; none, if the sequences part before the record begins.
    """
    record = turn.record
    stop = record.start + _num_shared_rows(record, as_token_ids(token_ids))
    return Turn(record=record.slice(record.start, stop), num_tokens=stop + 1)


def _check_order(turns: Sequence[Turn], num_tokens: int) -> None:
    """Each turn ends where the one before did, or further: what it saw of the sequence, at least."""
    ended = 0
    for index, turn in enumerate(turns):
        if not turn.record.num_rows:
            continue
        stop = min(turn.num_tokens, num_tokens)
        if stop < ended:
            raise SpanError(
                f"turn {index} ended at {stop} tokens, one before it at {ended}; pass turns in the order"
                " in which they ran, and shared_prefix of a turn of another branch"
            )
        ended = stop


def _num_shared_rows(record: RoutedExperts, tokens_N: npt.NDArray[np.int32]) -> int:
    # A hash covers all tokens up to its position, so an increment that follows others has no row that agrees.
    hashes_T = token_hashes(tokens_N[: record.stop])[record.start :]
    differs_T = hashes_T != record.token_hash_T[: len(hashes_T)]
    return int(differs_T.argmax()) if differs_T.any() else len(hashes_T)


def _join(records: Sequence[RoutedExperts], token_ids: TokenIds, truncate: bool) -> RoutedExperts:
    tokens_N = as_token_ids(token_ids)
    schema = records[0].schema
    rows = _Rows(
        ids_NLK=np.full(schema.shape(len(tokens_N)), schema.absent, schema.dtype),
        origin_N=np.zeros(len(tokens_N), np.uint8),
        version_N=np.zeros(len(tokens_N), np.uint32),
    )
    for index, record in enumerate(records):
        name = f"turn {index}" if len(records) > 1 else "the record"
        if record.schema != schema:
            raise SchemaMismatchError(f"{name} has {record.schema}, the first one {schema}")
        rows.fill(_fitted(record, tokens_N, truncate, name))
    return RoutedExperts.from_rows(
        schema, rows.ids_NLK, tokens_N, origin_T=rows.origin_N, version_T=rows.version_N
    )


def _fitted(
    record: RoutedExperts, tokens_N: npt.NDArray[np.int32], truncate: bool, name: str
) -> RoutedExperts:
    """The record without rows behind the last token, checked against the tokens."""
    num_tokens = len(tokens_N)
    if record.num_rows and record.stop > num_tokens:
        if not truncate:
            raise SpanError(
                f"{name} has rows up to position {record.stop - 1}, but there are {num_tokens} tokens;"
                " pass all tokens of the sequence, or truncate=True if it was cut short"
            )
        record = record.truncate(max(num_tokens, record.start))
    # Without rows there is nothing that could belong to other tokens.
    if record.num_rows:
        try:
            record.check_tokens(tokens_N)
        except TokenMismatchError as error:
            raise TokenMismatchError(
                f"{name}: {error}; if it ran on another branch, take its shared_prefix"
            ) from error
    return record


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a sequence that are known so far."""

    ids_NLK: RouteIds
    origin_N: npt.NDArray[np.uint8]
    version_N: npt.NDArray[np.uint32]

    def fill(self, record: RoutedExperts) -> None:
        """Take the rows of `record` that are still absent."""
        span = slice(record.start, record.stop)
        origin_T, version_T = rows_of_provenance(record.provenance, record.start, record.num_rows)
        taken_T = record.valid_T & (self.origin_N[span] == ABSENT)
        self.ids_NLK[span][taken_T] = record.ids_TLK[taken_T]
        self.origin_N[span][taken_T] = origin_T[taken_T]
        self.version_N[span][taken_T] = version_T[taken_T]
