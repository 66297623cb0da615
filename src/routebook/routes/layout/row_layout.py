"""Which positions of which sequences are the rows of a rank, and in which order.

Whole numbers only: no record is needed and no row is touched.

Legend of shape suffixes: T = rows of the rank, in the order in which its routers see them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routebook.routes.layout.packed_sequences import PackedSequences
from routebook.routes.layout.padded_sequences import PaddedSequences
from routebook.routes.layout.parallel_plan import ParallelPlan, ParallelRank
from routebook.routes.layout.segments import NO_SEQUENCE, Line, equal_part

Places = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """A micro-batch, arranged and padded, and the plan by which it is cut.

    Raises:
        ConfigError: the plan cannot cut this batch.
    """

    plan: ParallelPlan
    """How rows are spread over ranks."""

    sequences: PackedSequences | PaddedSequences
    """How the sequences lie in the batch."""

    def __post_init__(self) -> None:
        self.sequences.check_plan(self.plan)

    @property
    def num_rows(self) -> int:
        """T: rows that each rank has, padding included."""
        return self.sequences.num_rows * self.sequences.num_lines // self.plan.row_shares

    def lines(self, rank: ParallelRank) -> list[Line]:
        """The rank's rows as stretches, one line for each entry of the batch dimension.

        Context parallelism cuts first, sequence parallelism cuts what is left. Lines are equally long.

        Raises:
            ConfigError: the plan has no such rank.
        """
        self.plan.check_rank(rank)
        lines = self.sequences.context_lines(self.plan, rank.cp_rank)
        if not self.plan.sequence_parallel:
            return lines
        return [equal_part(line, self.plan.tensor_parallel_size, rank.tp_rank) for line in lines]

    def places(self, rank: ParallelRank) -> tuple[Places, Places]:
        """Sequence and position of each of the rank's rows.

        Returns:
            Two int32 `[T]`: index of the sequence and position in it; -1 in both for padding.

        Raises:
            ConfigError: the plan has no such rank.
        """
        return self._flat(self.lines(rank))

    def context_places(self, cp_rank: int) -> tuple[Places, Places]:
        """Sequence and position of what one context-parallel rank has, before sequence parallelism.

        Returns:
            As :meth:`places`, but `[B, S]` of the rank's `input_ids`, which no one transposes.

        Raises:
            ConfigError: the plan has no such rank.
        """
        self.plan.check_rank(ParallelRank(cp_rank=cp_rank))
        lines = self.sequences.context_lines(self.plan, cp_rank)
        sequence, position = zip(*(self._line_places(line) for line in lines), strict=True)
        return np.stack(sequence), np.stack(position)

    def _flat(self, lines: list[Line]) -> tuple[Places, Places]:
        axis = 0 if self.sequences.b_major else 1
        sequence, position = zip(*(self._line_places(line) for line in lines), strict=True)
        return np.stack(sequence, axis).reshape(-1), np.stack(position, axis).reshape(-1)

    def _line_places(self, line: Line) -> tuple[Places, Places]:
        sequence_T = np.concatenate([np.full(s.num_rows, s.sequence, np.int32) for s in line])
        position_T = np.concatenate(
            [np.arange(s.position, s.position + s.num_rows, dtype=np.int32) for s in line]
        )
        # The entry for NO_SEQUENCE is the last one: length 0 makes all its positions padding.
        lengths = np.array([*self.sequences.lengths, 0], np.int32)[sequence_T]
        padding_T = (position_T < 0) | (position_T >= lengths)
        return (
            np.where(padding_T, np.int32(NO_SEQUENCE), sequence_T),
            np.where(padding_T, np.int32(-1), position_T),
        )
