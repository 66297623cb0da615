"""A step cut at the borders of KV blocks.

Legend of shape suffixes: R = requests of the step, S = segments, T = rows of the segments, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routebook.ledger.spans import Index
from routebook.routes.provenance import Origin

MIN_ROWS_PER_RUN = 128
"""Whole blocks of one request are worth a call of their own from so many rows on."""

StoreRun = Callable[[int, int, int, int], bool]
"""Take `(request, first block, blocks, place in the step)`, whole blocks side by side, or return False."""


@dataclass(frozen=True, slots=True)
class StepSegments:
    """Maximal pieces of a step that lie in one block of one request; all arrays are int64 `[S]`."""

    request_S: Index
    """Place of the request in the step."""
    block_S: Index
    offset_S: Index
    """Offset of the first row in its block."""
    length_S: Index
    source_S: Index
    """Place of the first row in the step."""

    @classmethod
    def of_rest(
        cls, starts_R: Index, counts_R: Index, block_size: int, store_run: StoreRun
    ) -> StepSegments:
        """Offer the long runs of whole blocks to `store_run`, and cut what it does not take."""
        if not len(counts_R) or counts_R.max() < MIN_ROWS_PER_RUN:
            return cls.cut(starts_R, counts_R, block_size)
        pieces: list[tuple[int, int, int, int]] = []
        source = 0
        for r, (start, count) in enumerate(zip(starts_R.tolist(), counts_R.tolist(), strict=True)):
            head = -start % block_size
            num_blocks = (count - head) // block_size
            taken = head + num_blocks * block_size
            if taken - head >= MIN_ROWS_PER_RUN and store_run(
                r, (start + head) // block_size, num_blocks, source + head
            ):
                pieces.append((r, start, head, source))
                pieces.append((r, start + taken, count - taken, source + taken))
            else:
                pieces.append((r, start, count, source))
            source += count
        rest = [piece for piece in pieces if piece[2]]
        if not rest:
            return cls(*(np.zeros(0, np.int64) for _ in range(5)))
        request_R, starts_R, counts_R, source_R = np.array(rest, np.int64).T
        return cls._cut(request_R, starts_R, counts_R, source_R, block_size)

    @classmethod
    def cut(cls, starts_R: Index, counts_R: Index, block_size: int) -> StepSegments:
        """Cut the rows `[starts, starts + counts)` of each request; a request without rows has no segment."""
        request_R, source_R = np.arange(len(starts_R)), np.cumsum(counts_R) - counts_R
        if not counts_R.all():
            request_R = np.flatnonzero(counts_R)
            starts_R, counts_R = starts_R[request_R], counts_R[request_R]
            source_R = source_R[request_R]
        return cls._cut(request_R, starts_R, counts_R, source_R, block_size)

    @classmethod
    def _cut(
        cls,
        request_R: Index,
        starts_R: Index,
        counts_R: Index,
        source_R: Index,
        block_size: int,
    ) -> StepSegments:
        first_R, offset_R = np.divmod(starts_R, block_size)
        last_R, tail_R = np.divmod(offset_R + counts_R - 1, block_size)
        if not last_R.any():
            # A step of decodes: nothing to cut.
            return cls(request_R, first_R, offset_R, counts_R, source_R)
        pieces_R = last_R + 1
        ends_R = np.cumsum(pieces_R)
        begins_R = ends_R - pieces_R
        nth_S = np.arange(int(ends_R[-1])) - np.repeat(begins_R, pieces_R)
        offset_S = np.zeros_like(nth_S)
        offset_S[begins_R] = offset_R
        length_S = np.full_like(nth_S, block_size)
        length_S[begins_R] -= offset_R
        length_S[ends_R - 1] -= block_size - 1 - tail_R
        block_S = nth_S + np.repeat(first_R, pieces_R)
        source_S = nth_S * block_size + np.repeat(source_R - offset_R, pieces_R) + offset_S
        return cls(np.repeat(request_R, pieces_R), block_S, offset_S, length_S, source_S)

    def __len__(self) -> int:
        return len(self.request_S)

    def pick(self, which: npt.NDArray[np.bool_] | Index) -> StepSegments:
        """Keep some segments, by mask or by index."""
        return StepSegments(
            self.request_S[which],
            self.block_S[which],
            self.offset_S[which],
            self.length_S[which],
            self.source_S[which],
        )

    def origins(self, prompt_S: Index, block_size: int) -> npt.NDArray[np.uint8] | int:
        """`PREFILL` below the prompt tokens of each segment's request, else `DECODE`: uint8 `[T]`, or one for all."""
        begin_S = self.block_S * block_size + self.offset_S
        if (begin_S >= prompt_S).all():
            return int(Origin.DECODE)
        if (begin_S + self.length_S <= prompt_S).all():
            return int(Origin.PREFILL)
        in_prompt_T = self.rows(begin_S) < np.repeat(prompt_S, self.length_S)
        return np.where(in_prompt_T, Origin.PREFILL, Origin.DECODE).astype(np.uint8)

    def rows(self, first_S: Index) -> Index:
        """Expand each segment to `first, first + 1, ...`, one number per row, int64 `[T]`."""
        total = int(self.length_S.sum())
        if total == len(self):
            return first_S
        before_S = np.cumsum(self.length_S) - self.length_S
        return np.repeat(first_S - before_S, self.length_S) + np.arange(total)


def run_origins(
    first: int, num_blocks: int, prompt_tokens: int, block_size: int
) -> npt.NDArray[np.uint8] | int:
    """`PREFILL` below the prompt tokens, else `DECODE`, for blocks `[first, first + num_blocks)`: uint8
    `[num_blocks, block_size]`, or one for all."""
    start, stop = first * block_size, (first + num_blocks) * block_size
    if not start < prompt_tokens < stop:
        return int(Origin.DECODE if start >= prompt_tokens else Origin.PREFILL)
    origin_T = np.full(stop - start, Origin.DECODE, np.uint8)
    origin_T[: prompt_tokens - start] = Origin.PREFILL
    return origin_T.reshape(num_blocks, block_size)
