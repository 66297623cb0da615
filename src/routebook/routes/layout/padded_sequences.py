"""Sequences side by side in a rectangle `[batch, sequence]`, with padding before and behind each.

Legend of shape suffixes: B = sequences, S = columns of the rectangle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routebook.config import check_choice
from routebook.errors import ConfigError, SpanError
from routebook.routes.layout.parallel_plan import ParallelPlan
from routebook.routes.layout.segments import Line, Segment, equal_part, zigzag_part
from routebook.routes.layout.sequence_lengths import check_lengths

ORDERS = ("s_major", "b_major")


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedSequences:
    """Where each sequence lies in its row of the rectangle, and how a router flattens the rectangle.

    Raises:
        ConfigError: an order that is not known.
        SpanError: no sequence, an empty one, or one that does not fit into the columns.
    """

    lengths: tuple[int, ...]
    """Tokens of each sequence."""

    starts: tuple[int, ...]
    """Column of each sequence's first token: 0 if all padding is on the right."""

    num_columns: int
    """S, the padded length of all sequences."""

    order: str
    """`s_major`: row `s * B + b`, as megatron-core's `[sequence, batch]` activations flatten; `b_major`:
    row `b * S + s`, as those of transformers do."""

    def __post_init__(self) -> None:
        check_choice("order", self.order, ORDERS)
        check_lengths(self.lengths)
        if len(self.starts) != len(self.lengths):
            raise SpanError(
                f"{len(self.starts)} starts for {len(self.lengths)} sequences; pass one for each"
            )
        for index, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            if start < 0 or start + length > self.num_columns:
                raise SpanError(
                    f"sequence {index} lies in the columns [{start}, {start + length}), but there are"
                    f" {self.num_columns}; pad to more or cut the sequence"
                )

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], num_columns: int, *, order: str, padding_side: str
    ) -> PaddedSequences:
        """All padding on one side.

        Args:
            lengths: tokens of each sequence.
            num_columns: the padded length of all.
            order: `s_major` or `b_major`.
            padding_side: `right` or `left`.

        Raises:
            ConfigError: a side or order that is not known.
            SpanError: a sequence that does not fit.
        """
        check_choice("padding_side", padding_side, ("right", "left"))
        left = padding_side == "left"
        whole = tuple(int(length) for length in lengths)
        starts = tuple(num_columns - length if left else 0 for length in whole)
        return cls(lengths=whole, starts=starts, num_columns=num_columns, order=order)

    @classmethod
    def from_attention_mask(
        cls, attention_mask_BS: npt.NDArray[np.generic], *, order: str
    ) -> PaddedSequences:
        """Where the mask is not 0, as of left-padded prompts with right-padded completions.

        Args:
            attention_mask_BS: `[B, S]`, 0 or False where there is padding.
            order: `s_major` or `b_major`.

        Raises:
            SpanError: not two axes, an empty sequence, or padding between tokens of one.
        """
        mask_BS = np.asarray(attention_mask_BS) != 0
        if mask_BS.ndim != 2 or not mask_BS.any(axis=1).all():
            raise SpanError(
                f"attention_mask of shape {mask_BS.shape} must be [batch, sequence] with a token in"
                " every row"
            )
        lengths_B, starts_B = mask_BS.sum(axis=1), mask_BS.argmax(axis=1)
        stops_B = mask_BS.shape[1] - mask_BS[:, ::-1].argmax(axis=1)
        gaps_B = np.flatnonzero(stops_B - starts_B != lengths_B)
        if gaps_B.size:
            raise SpanError(
                f"attention_mask has padding between the tokens of sequence {gaps_B[0]}; tokens of a"
                " sequence must follow each other"
            )
        return cls(
            lengths=tuple(lengths_B.tolist()),
            starts=tuple(starts_B.tolist()),
            num_columns=mask_BS.shape[1],
            order=order,
        )

    @property
    def num_rows(self) -> int:
        """Rows of one line: columns of the rectangle."""
        return self.num_columns

    @property
    def num_lines(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def b_major(self) -> bool:
        """Whether all rows of a sequence follow each other."""
        return self.order == "b_major"

    def check_plan(self, plan: ParallelPlan) -> None:
        """Check that every row will belong to exactly one rank.

        Raises:
            ConfigError: the columns do not divide.
        """
        shares = plan.row_shares
        if self.num_columns % plan.context_multiple or self.num_columns % shares:
            raise ConfigError(
                f"{self.num_columns} columns do not divide between the ranks; pad them to a multiple of"
                f" {plan.sequence_multiple} (tensor_parallel_size * context_parallel_size, and twice"
                " that for zigzag)"
            )

    def context_lines(self, plan: ParallelPlan, cp_rank: int) -> list[Line]:
        """The lines of one context-parallel rank, one for each sequence."""
        part = zigzag_part if plan.cuts_zigzag else equal_part
        return [
            part([Segment(b, -start, self.num_columns)], plan.context_parallel_size, cp_rank)
            for b, start in enumerate(self.starts)
        ]
