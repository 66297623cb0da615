"""A step cut at the borders of KV blocks.

Legend of shape suffixes: R = requests of the step, S = segments, T = rows of the segments, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routebook.ledger.spans import Index
from routebook.routes.provenance import Origin


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
    def cut(cls, starts_R: Index, counts_R: Index, block_size: int) -> StepSegments:
        """Cut the rows `[starts, starts + counts)` of each request; a request without rows has no segment."""
        stops_R = starts_R + counts_R
        first_R = starts_R // block_size
        before_R = np.cumsum(counts_R) - counts_R
        pieces_R = np.where(counts_R > 0, (stops_R - 1) // block_size - first_R + 1, 0)
        if (pieces_R == 1).all():
            # A step of decodes: nothing to cut.
            offset_R = starts_R - first_R * block_size
            return cls(np.arange(len(starts_R)), first_R, offset_R, counts_R, before_R)
        request_S = np.repeat(np.arange(len(starts_R)), pieces_R)
        nth_S = np.arange(len(request_S)) - (np.cumsum(pieces_R) - pieces_R)[request_S]
        block_S = first_R[request_S] + nth_S
        begin_S = np.maximum(starts_R[request_S], block_S * block_size)
        length_S = np.minimum(stops_R[request_S], (block_S + 1) * block_size) - begin_S
        source_S = (before_R - starts_R)[request_S] + begin_S
        return cls(request_S, block_S, begin_S - block_S * block_size, length_S, source_S)

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
