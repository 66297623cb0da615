"""Records and the tokens that they belong to, arranged as a micro-batch, and cut for each rank.

Rows are cut before they are widened: a rank reads its own rows of its own layers and nothing else, in the record's
one or two bytes an id, and each is written once, into the result.

Legend of shape suffixes: T = rows of the rank, L = MoE layers of its chunk, K = top-k, B = batch, S = sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from routebook.errors import SchemaMismatchError, SpanError, TokenMismatchError
from routebook.routes.layout.parallel_plan import ParallelRank
from routebook.routes.layout.pipeline_stages import stage_layers
from routebook.routes.layout.rank_rows import ABSENT, RankRows
from routebook.routes.layout.row_layout import RowLayout
from routebook.routes.layout.segments import NO_SEQUENCE, Line, Segment
from routebook.routes.record import RoutedExperts
from routebook.routes.schema import RouteSchema
from routebook.routes.token_hash import TokenIds, as_token_ids

Ids = npt.NDArray[np.integer]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """One record for each sequence of a layout, checked against the sequence's tokens.

    Positions that a record does not cover are absent: the last token of a sequence, tokens of a tool behind the
    last turn, or a prompt whose rows were not asked for.

    Raises:
        SchemaMismatchError: records of different models.
        SpanError: another number of records or tokens than the layout has, or a record that is longer than
            its sequence.
        TokenMismatchError: a record was computed for other tokens; names sequence and position.
    """

    layout: RowLayout
    """Where the sequences lie."""

    records: Sequence[RoutedExperts]
    """One for each sequence."""

    token_ids: Sequence[TokenIds]
    """All tokens of each sequence, from position 0 on, without padding."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "records", tuple(self.records))
        tokens = tuple(as_token_ids(tokens_T) for tokens_T in self.token_ids)
        object.__setattr__(self, "token_ids", tokens)
        lengths = self.layout.sequences.lengths
        given = tuple(len(tokens_T) for tokens_T in tokens)
        if given != lengths or len(self.records) != len(lengths):
            raise SpanError(
                f"{len(self.records)} records and sequences of {given} tokens for a layout of"
                f" {lengths} tokens; pass all of the batch, in its order, without padding"
            )
        for index, record in enumerate(self.records):
            self._check_record(index, record)

    @property
    def schema(self) -> RouteSchema:
        """Of all records."""
        return self.records[0].schema

    def layers_for(self, rank: ParallelRank) -> slice:
        """Entries of the schema's layer axis that the rank's chunk has; dense layers have none.

        Raises:
            ConfigError: the plan has no such rank, or cannot split the model's layers.
        """
        self.layout.plan.check_rank(rank)
        layers = stage_layers(
            self.layout.plan, self.schema.num_hidden_layers, rank.pp_rank, rank.vp_stage
        )
        layer_ids = self.schema.layer_ids
        return slice(bisect_left(layer_ids, layers.start), bisect_left(layer_ids, layers.stop))

    def rows_for(
        self, rank: ParallelRank, *, widen: bool = True, out: Ids | None = None
    ) -> RankRows:
        """The rows that one rank's chunk replays.

        Args:
            rank: which rank, and which of its chunks.
            widen: int64 ids, as routers take them. False keeps the schema's dtype, an eighth of the bytes or a
                quarter, to be widened on the device; then only the masks tell which rows are valid.
            out: where to write the ids, `[T, L, K]` in the dtype asked for, contiguous. New memory costs more than
                the copy, so a trainer keeps one for each shape.

        Raises:
            ConfigError: the plan has no such rank, or cannot split the model's layers.
            SchemaMismatchError: `out` has another shape or dtype, or is not contiguous.
        """
        layers = self.layers_for(rank)
        lines = self.layout.lines(rank)
        num_rows = self.layout.num_rows
        shape = (num_rows, layers.stop - layers.start, self.schema.top_k)
        ids_TLK = _output(out, shape, np.dtype(np.int64) if widen else self.schema.dtype)
        filler = ABSENT if widen else self.schema.absent
        valid_T, padding_T = np.zeros(num_rows, np.bool_), np.ones(num_rows, np.bool_)
        for index, line in enumerate(lines):
            views = [self._line_view(array, index) for array in (ids_TLK, valid_T, padding_T)]
            self._fill_line(line, views, layers, filler)
        return RankRows(
            ids_TLK=ids_TLK,
            valid_T=valid_T,
            padding_T=padding_T,
            layer_ids=self.schema.layer_ids[layers],
        )

    def check_input_ids(self, input_ids_BS: npt.NDArray[np.integer], cp_rank: int = 0) -> None:
        """Check that a rank was given the tokens that this layout cuts for it.

        Args:
            input_ids_BS: what the rank's model gets, `[B, S]`, or `[S]` if packed: after context parallelism, before
                sequence parallelism. What stands in padding does not matter.
            cp_rank: the context-parallel rank.

        Raises:
            ConfigError: the plan has no such rank.
            SpanError: another shape than the layout has.
            TokenMismatchError: tokens and rows are cut differently; names row, sequence and position.
        """
        sequence_BS, position_BS = self.layout.context_places(cp_rank)
        given_BS = np.atleast_2d(np.asarray(input_ids_BS))
        if given_BS.shape != sequence_BS.shape:
            raise SpanError(
                f"input_ids have the shape {given_BS.shape}, this layout {sequence_BS.shape}; the plan,"
                " or the padding, is another one than the trainer's"
            )
        wrong_BS = (self._tokens_at(sequence_BS, position_BS) != given_BS) & (sequence_BS >= 0)
        if wrong_BS.any():
            b, s = np.argwhere(wrong_BS)[0].tolist()
            raise TokenMismatchError(
                f"input_ids[{b}, {s}] of context-parallel rank {cp_rank} is {given_BS[b, s]}, but the"
                f" layout has position {position_BS[b, s]} of sequence {sequence_BS[b, s]} there; tokens"
                " and rows are cut differently: check context_parallel_layout and the padding"
            )

    def _tokens_at(
        self, sequence_BS: npt.NDArray[np.int32], position_BS: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """The tokens at these places; anything at all where there is padding."""
        all_T = np.concatenate([as_token_ids(tokens_T) for tokens_T in self.token_ids])
        firsts = np.cumsum([0, *self.layout.sequences.lengths])
        places_BS = np.where(sequence_BS == NO_SEQUENCE, 0, firsts[sequence_BS] + position_BS)
        return all_T[places_BS]

    def _check_record(self, index: int, record: RoutedExperts) -> None:
        if record.schema != self.schema:
            raise SchemaMismatchError(
                f"the record of sequence {index} has {record.schema}, the first one {self.schema}"
            )
        num_tokens = self.layout.sequences.lengths[index]
        if record.stop > num_tokens:
            raise SpanError(
                f"the record of sequence {index} ends at position {record.stop}, its tokens at"
                f" {num_tokens}; if the sequence was cut, align the record with truncate=True"
            )
        try:
            record.check_tokens(self.token_ids[index])
        except TokenMismatchError as error:
            raise TokenMismatchError(f"sequence {index}: {error}") from error

    def _line_view(self, array_T: npt.NDArray[Any], index: int) -> npt.NDArray[Any]:
        """The part of a result that one line fills, as a view."""
        num_lines, tail = self.layout.sequences.num_lines, array_T.shape[1:]
        per_line = len(array_T) // num_lines
        view: npt.NDArray[Any]
        if self.layout.sequences.b_major:
            view = array_T.reshape(num_lines, per_line, *tail)[index]
        else:
            view = array_T.reshape(per_line, num_lines, *tail)[:, index]
        return view

    def _fill_line(
        self, line: Line, views: list[npt.NDArray[Any]], layers: slice, filler: int
    ) -> None:
        at = 0
        for segment in line:
            self._fill(
                [view[at : at + segment.num_rows] for view in views], segment, layers, filler
            )
            at += segment.num_rows

    def _fill(
        self, views: list[npt.NDArray[Any]], segment: Segment, layers: slice, filler: int
    ) -> None:
        ids_TLK, valid_T, padding_T = views
        if segment.sequence == NO_SEQUENCE:
            ids_TLK[...] = filler
            return
        record = self.records[segment.sequence]
        num_tokens = self.layout.sequences.lengths[segment.sequence]
        padding_T[_within(segment, 0, num_tokens)] = False
        known = _within(segment, record.start, record.stop)
        ids_TLK[: known.start], ids_TLK[known.stop :] = filler, filler
        shift = segment.position - record.start
        rows = slice(known.start + shift, known.stop + shift)
        ids_TLK[known] = record.ids_TLK[rows, layers]
        valid_T[known] = record.valid_T[rows]
        if not valid_T[known].all():
            ids_TLK[known][~valid_T[known]] = filler


def _within(segment: Segment, start: int, stop: int) -> slice:
    """Which of a segment's rows lie at positions `[start, stop)`."""
    a = min(max(start - segment.position, 0), segment.num_rows)
    return slice(a, max(a, min(stop - segment.position, segment.num_rows)))


def _output(out: Ids | None, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> Ids:
    if out is None:
        return np.empty(shape, dtype)
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous:
        raise SchemaMismatchError(
            f"out is {out.dtype} of shape {out.shape}; the rank's rows are {dtype} of shape {shape},"
            " contiguous"
        )
    return out
