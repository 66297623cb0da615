"""Contexts of a batch of decodes, kept as they were gathered, from one step to the next.

To attend, the keys and values of each sequence are gathered from the pool's blocks into one piece. The next step of the
same batch needs the same piece and one token more per sequence, which is written behind the others instead of
gathering all of them again. The pool stays the truth: what is kept here can be dropped at any time.

Legend of shape suffixes: T = B = sequences, one token each, C = context length (padded), G = KV heads,
D = size of a key head, V = size of a value head.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from routebook.engine.input_batch import StepInputs

_MOST_BYTES = 2**28
"""Keys and values of all layers; a batch that needs more is gathered anew in each step."""

Contexts = tuple[torch.Tensor, torch.Tensor]
"""Keys `[B, G, C, D]` and values `[B, G, C, V]`, head by head in memory."""


class KeptContexts:
    """Gathered contexts of the last step, if it was one of decodes only.

    Args:
        bytes_per_token: of keys and values, all layers.
    """

    def __init__(self, bytes_per_token: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._layers: dict[int, Contexts] = {}
        self._places: dict[tuple[int, int], torch.Tensor] = {}
        self._last: StepInputs | None = None
        self._context = 0
        self._continues = False

    def begin_step(self, inputs: StepInputs, context: int) -> bool:
        """Say what the next step is; returns whether its contexts shall be kept at all.

        Args:
            inputs: a step of decodes, one token of each request.
            context: tokens of the longest sequence, up to the end of its last block.
        """
        self._continues = (
            self._last is not None
            and context == self._context
            and inputs.generation == self._last.generation
            and np.array_equal(inputs.rows_R, self._last.rows_R)
            and np.array_equal(inputs.starts_R, self._last.starts_R + 1)
        )
        self._places = {}
        if not self._continues:
            self._layers = {}
        if len(inputs.rows_R) * context * self._bytes_per_token > _MOST_BYTES:
            self.clear()
            return False
        self._last, self._context = inputs, context
        return True

    def clear(self) -> None:
        """Let go of everything."""
        self._last, self._layers, self._places = None, {}, {}

    def extended(
        self,
        layer: int,
        positions_B: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGV: torch.Tensor,
        gather: Callable[[], Contexts],
    ) -> Contexts:
        """The contexts of a layer, the step's own tokens included.

        Args:
            layer: attention layer.
            positions_B: position of each sequence's token.
            key_TGD: keys of the step.
            value_TGV: values of the step.
            gather: takes the contexts from the pool, which has the step's keys and values already.
        """
        if layer not in self._layers or not self._continues:
            self._layers[layer] = gather()
            return self._layers[layer]
        kept = self._layers[layer]
        for whole, new_TGN in zip(kept, (key_TGD, value_TGV), strict=True):
            _, num_heads, context, size = whole.shape
            flat = whole.transpose(0, 1).view(-1, size)
            places = self._places_of(positions_B, num_heads, context)
            flat.index_copy_(0, places, new_TGN.transpose(0, 1).reshape(-1, size))
        return kept

    def _places_of(self, positions_B: torch.Tensor, num_heads: int, context: int) -> torch.Tensor:
        """Row of each head's and sequence's token, `[G * B]`; the same for all layers of a shape."""
        name = (num_heads, context)
        if name not in self._places:
            firsts = torch.arange(num_heads * len(positions_B), device=positions_B.device)
            self._places[name] = firsts * context + positions_B.repeat(num_heads)
        return self._places[name]
