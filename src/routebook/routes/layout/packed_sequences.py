"""Sequences one after the other in one line, each with padding behind it ("THD", `cu_seqlens`).

A packed line is cut between context-parallel ranks either sequence by sequence (zigzag) or as a whole (contiguous).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from routebook.errors import ConfigError, SpanError
from routebook.routes.layout.packing_config import PackingConfig
from routebook.routes.layout.parallel_plan import ParallelPlan
from routebook.routes.layout.segments import (
    NO_SEQUENCE,
    Line,
    Segment,
    cut,
    equal_part,
    zigzag_part,
)
from routebook.routes.layout.sequence_lengths import check_lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSequences:
    """Lengths of packed sequences, without and with their padding.

    Raises:
        SpanError: no sequence, an empty one, or one that is longer than its padded length.
    """

    lengths: tuple[int, ...]
    """Tokens of each sequence."""

    padded_lengths: tuple[int, ...]
    """Rows of each sequence, the padding behind it included."""

    tail: int = 0
    """Rows of padding behind all sequences that belong to none."""

    def __post_init__(self) -> None:
        check_lengths(self.lengths)
        if len(self.padded_lengths) != len(self.lengths) or self.tail < 0:
            raise SpanError(
                f"{len(self.padded_lengths)} padded lengths for {len(self.lengths)} sequences and"
                f" {self.tail} rows behind them; pass one padded length for each sequence"
            )
        for index, (length, padded) in enumerate(
            zip(self.lengths, self.padded_lengths, strict=True)
        ):
            if padded < length:
                raise SpanError(
                    f"sequence {index} has {length} tokens but room for {padded} rows only; the"
                    " lengths and cu_seqlens are of different batches"
                )

    @classmethod
    def pack(
        cls, lengths: Sequence[int], plan: ParallelPlan, config: PackingConfig | None = None
    ) -> PackedSequences:
        """Pad as a trainer does that follows this plan and config.

        Args:
            lengths: tokens of each sequence, in the order in which they are packed.
            plan: how they will be cut.
            config: how they are padded; the defaults if it is left out.

        Raises:
            ConfigError: multiples that the plan cannot cut.
            SpanError: no sequence, or an empty one.
        """
        config = config or PackingConfig()
        whole = tuple(int(length) for length in lengths)
        check_lengths(whole)
        multiple = config.sequence_multiple or plan.sequence_multiple
        padded = [_round_up(length, multiple) for length in whole]
        total = _round_up(max(sum(padded), config.min_tokens), config.total_multiple)
        extra, tail = total - sum(padded), 0
        if config.total_padding == "own_sequence":
            extra, tail = 0, extra
        padded[-1] += extra
        packed = cls(lengths=whole, padded_lengths=tuple(padded), tail=tail)
        packed.check_plan(plan)
        return packed

    @classmethod
    def from_cu_seqlens(
        cls, lengths: Sequence[int], cu_seqlens_padded: Sequence[int] | npt.NDArray[np.integer]
    ) -> PackedSequences:
        """Take the padding from what the trainer gives its attention kernels.

        Args:
            lengths: tokens of each sequence.
            cu_seqlens_padded: where each sequence begins in the padded line of *all* context-parallel
                ranks, and where the last one ends; one entry more for a sequence of nothing but padding.

        Raises:
            SpanError: it does not begin at 0, or has not one entry (or two) more than there are sequences.
        """
        edges = [int(edge) for edge in cu_seqlens_padded]
        if not edges or edges[0] != 0 or len(edges) - len(lengths) not in (1, 2):
            raise SpanError(
                f"cu_seqlens_padded={edges} must begin with 0 and have one entry more than the"
                f" {len(lengths)} sequences, or two if the last is padding"
            )
        sizes = np.diff(edges).tolist()
        num_seqs = len(lengths)
        return cls(
            lengths=tuple(int(length) for length in lengths),
            padded_lengths=tuple(sizes[:num_seqs]),
            tail=sum(sizes[num_seqs:]),
        )

    @property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """int32 `[sequences + 1]`: where each would begin without padding."""
        return np.array([0, *accumulate(self.lengths)], np.int32)

    @property
    def cu_seqlens_padded(self) -> npt.NDArray[np.int32]:
        """int32: where each begins, and the end; with an entry more if there is a tail."""
        tail = [self.tail] if self.tail else []
        return np.array([0, *accumulate([*self.padded_lengths, *tail])], np.int32)

    @property
    def num_rows(self) -> int:
        """Rows of the padded line."""
        return sum(self.padded_lengths) + self.tail

    @property
    def num_lines(self) -> int:
        """One: batch dimension 1."""
        return 1

    @property
    def b_major(self) -> bool:
        """Of no consequence for a single line."""
        return False

    def check_plan(self, plan: ParallelPlan) -> None:
        """Check that every row will belong to exactly one rank.

        Raises:
            ConfigError: a padded length, or the whole, that does not divide.
        """
        for index, padded in enumerate(self.padded_lengths if plan.cuts_zigzag else ()):
            if padded % plan.context_multiple:
                raise ConfigError(
                    f"sequence {index} has {padded} padded rows, which do not divide into"
                    f" {plan.context_multiple} chunks (2 * context_parallel_size): rows in the middle"
                    f" would belong to no rank; make multiples of {plan.sequence_multiple}"
                )
        if self.num_rows % plan.row_shares:
            raise ConfigError(
                f"{self.num_rows} padded rows do not divide between {plan.row_shares} ranks"
                " (context_parallel_size, times tensor_parallel_size if sequence_parallel); make"
                f" total_multiple a multiple of {plan.row_shares}"
            )

    def context_lines(self, plan: ParallelPlan, cp_rank: int) -> list[Line]:
        """The line of one context-parallel rank, as a list of this one."""
        line = [Segment(i, 0, padded) for i, padded in enumerate(self.padded_lengths)]
        tail = [Segment(NO_SEQUENCE, 0, self.tail)]
        if not plan.cuts_zigzag:
            return [equal_part(line + tail, plan.context_parallel_size, cp_rank)]
        size = plan.context_parallel_size
        parts = [zigzag_part([segment], size, cp_rank) for segment in line]
        return [[*(s for part in parts for s in part), *cut(tail, 0, self.tail // size)]]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
