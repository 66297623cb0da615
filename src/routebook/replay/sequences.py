"""Where the sequences of a batch lie among the rows of its forward pass.

A transformers block flattens a batch `[B, S]` into rows `b * S + s`. Legend of shape suffixes: B = batch, S = padded
length, N = rows of the forward = B * S.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from routebook.errors import ReplayError

Integers = npt.ArrayLike | torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Sequences as spans of rows, in the order of the batch; all other rows are padding."""

    num_rows: int
    spans: tuple[tuple[int, int], ...]
    """`(first row, number of tokens)` of each sequence, position 0 first."""

    @classmethod
    def padded(cls, attention_mask_BS: Integers) -> Sequences:
        """One sequence per line of a batch that is padded on the left, on the right, or on both sides.

        Args:
            attention_mask_BS: 1 where there is a token, 0 where there is padding.

        Raises:
            ReplayError: another shape or other values, or padding between tokens.
        """
        mask_BS = _array(attention_mask_BS)
        if mask_BS.ndim != 2 or not np.isin(mask_BS, (0, 1)).all():
            raise ReplayError(
                f"attention_mask of shape {list(mask_BS.shape)} with values {np.unique(mask_BS)[:4]} is not "
                "[batch, length] of 0 and 1; hand over a RouteBatch made with Sequences of your own"
            )
        length = mask_BS.shape[1]
        spans = [_span(b, mask_S.astype(bool), length) for b, mask_S in enumerate(mask_BS)]
        return cls(num_rows=mask_BS.size, spans=tuple(spans))

    @classmethod
    def packed(cls, cu_seqlens: Integers, num_rows: int) -> Sequences:
        """Sequences that follow each other in one line; rows after the last one are padding.

        Args:
            cu_seqlens: where each sequence begins, and where the last one ends.
            num_rows: rows of the forward.

        Raises:
            ReplayError: borders that do not ascend from 0, or lie beyond the rows.
        """
        borders = _array(cu_seqlens)
        if (
            borders.ndim != 1
            or len(borders) < 2
            or borders[0] != 0
            or (np.diff(borders) <= 0).any()
        ):
            raise ReplayError(f"cu_seqlens={borders} must ascend from 0, one border per sequence")
        if borders[-1] > num_rows:
            raise ReplayError(f"cu_seqlens end at {borders[-1]}, the forward has {num_rows} rows")
        spans = zip(borders[:-1].tolist(), np.diff(borders).tolist(), strict=True)
        return cls(num_rows=num_rows, spans=tuple(spans))

    @classmethod
    def from_positions(cls, position_ids_N: Integers) -> Sequences:
        """Sequences of one packed line: each begins where a position is 0 and counts up from there.

        Raises:
            ReplayError: the positions do not count up from 0 in every sequence.
        """
        positions_N = _array(position_ids_N).reshape(-1)
        num_rows = len(positions_N)
        starts = np.flatnonzero(positions_N == 0)
        if not len(starts) or starts[0] != 0:
            raise ReplayError("position_ids of a packed batch must begin with 0")
        expected_N = np.arange(num_rows) - np.repeat(starts, np.diff(np.append(starts, num_rows)))
        if (positions_N != expected_N).any():
            row = int(np.flatnonzero(positions_N != expected_N)[0])
            raise ReplayError(
                f"position_ids of a packed batch must count up by one; row {row} has {positions_N[row]} "
                f"instead of {expected_N[row]}"
            )
        return cls.packed(np.append(starts, num_rows), num_rows)

    @property
    def token_mask(self) -> npt.NDArray[np.bool_]:
        """bool `[N]`: rows that hold a token."""
        real_N = np.zeros(self.num_rows, np.bool_)
        for first, length in self.spans:
            real_N[first : first + length] = True
        return real_N


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCall:
    """What a forward pass of the decoder was called with, as far as it says where the tokens are."""

    batch: int
    length: int
    input_ids_BS: torch.Tensor | None
    attention_mask: Any = None
    position_ids: Any = None
    cu_seqlens: Any = None

    @classmethod
    def of_arguments(cls, arguments: Mapping[str, Any]) -> ModelCall:
        """Read the arguments of a decoder's forward, by name.

        Raises:
            ReplayError: there are no tokens, or tokens before these were cached.
        """
        input_ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
        tokens = input_ids if input_ids is not None else embeds
        if tokens is None:
            raise ReplayError("the decoder was called without input_ids and inputs_embeds")
        _refuse_cached(arguments.get("past_key_values"))
        return cls(
            batch=tokens.shape[0],
            length=tokens.shape[1],
            input_ids_BS=input_ids,
            attention_mask=arguments.get("attention_mask"),
            position_ids=arguments.get("position_ids"),
            cu_seqlens=arguments.get("cu_seq_lens_q"),
        )

    @property
    def num_rows(self) -> int:
        """Rows of the forward, padding included."""
        return self.batch * self.length

    def sequences(self, num_sequences: int | None = None) -> Sequences:
        """Where the sequences lie.

        Args:
            num_sequences: how many there should be; None: as many as the call says.

        Raises:
            ReplayError: the call does not say it, or there is another number of them.
        """
        found = self._sequences()
        if num_sequences is not None and len(found.spans) != num_sequences:
            raise ReplayError(
                f"{num_sequences} records for a batch of {len(found.spans)} sequences; give one each, "
                "None for a sequence that has no record"
            )
        return found

    def _sequences(self) -> Sequences:
        if self.cu_seqlens is not None:
            return Sequences.packed(self.cu_seqlens, self.num_rows)
        mask = self.attention_mask
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
            kind = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise ReplayError(
                f"the attention mask is {kind}, which does not say where each sequence lies; hand over a "
                "RouteBatch made with Sequences of your own"
            )
        ones = np.ones((self.batch, self.length), np.int64)
        lines = Sequences.padded(ones if mask is None else mask)
        positions_BS = self._positions()
        if positions_BS is None:
            return lines
        spans = [
            span
            for line, positions_S in zip(lines.spans, positions_BS, strict=True)
            for span in self._packed(line, positions_S)
        ]
        return Sequences(num_rows=self.num_rows, spans=tuple(spans))

    def _positions(self) -> npt.NDArray[Any] | None:
        """Positions `[B, S]`; several axes of them, as for images, say nothing about packing."""
        if self.position_ids is None or self.position_ids.dim() > 2:
            return None
        return np.broadcast_to(_array(self.position_ids), (self.batch, self.length))

    def _packed(
        self, line: tuple[int, int], positions_S: npt.NDArray[Any]
    ) -> tuple[tuple[int, int], ...]:
        """The sequences of one line without its padding: one, or several where the positions begin anew."""
        first, length = line
        column = first % self.length if self.length else 0
        positions = positions_S[column : column + length]
        if (positions[1:] != 0).all():
            return (line,)
        packed = Sequences.from_positions(positions)
        return tuple((first + start, size) for start, size in packed.spans)


def _array(values: Integers) -> npt.NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def _span(b: int, mask_S: npt.NDArray[np.bool_], length: int) -> tuple[int, int]:
    places = np.flatnonzero(mask_S)
    if not len(places):
        return b * length, 0
    if places[-1] - places[0] + 1 != len(places):
        raise ReplayError(
            f"line {b} of the attention mask has padding between tokens, so that a row has no position"
        )
    return b * length + int(places[0]), len(places)


def _refuse_cached(cache: Any) -> None:
    num_cached = (
        0 if cache is None or not hasattr(cache, "get_seq_length") else cache.get_seq_length()
    )
    if num_cached:
        raise ReplayError(
            f"the forward continues a KV cache of {num_cached} tokens; routes are replayed over whole "
            "sequences, so call the model without past_key_values"
        )
