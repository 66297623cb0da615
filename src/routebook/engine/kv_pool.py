"""The tensors behind the KV blocks, one pair per attention layer.

Legend of shape suffixes: S = slots of the pool, G = KV heads, D = size of a key head, V = size of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from routebook.engine.transfers import upload


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one attention layer keeps per token; keys and values may differ in size."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numel(self) -> int:
        """Numbers per token."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class KVPool:
    """Keys `[G, S, D]` and values `[G, S, V]` of every attention layer; slot = block_id * block_size + offset.

    Head by head, so that what is read for a sequence lies, for each head, in one piece: attention over it is then a
    fifth faster than over heads that lie interleaved.
    """

    def __init__(
        self,
        shapes: dict[int, KVShape],
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        self._block_size = block_size
        num_slots = num_blocks * block_size

        def zeros(num_heads: int, dim: int) -> torch.Tensor:
            # Zeros, not empty: see `clear`.
            return torch.zeros(num_heads, num_slots, dim, dtype=dtype, device=device)

        self._keys = {i: zeros(s.num_kv_heads, s.key_dim) for i, s in shapes.items()}
        self._values = {i: zeros(s.num_kv_heads, s.value_dim) for i, s in shapes.items()}

    def write(
        self, layer: int, slots_T: torch.Tensor, key_TGD: torch.Tensor, value_TGV: torch.Tensor
    ) -> None:
        """Store a step's keys and values of one layer."""
        self._keys[layer].index_copy_(1, slots_T, key_TGD.transpose(0, 1))
        self._values[layer].index_copy_(1, slots_T, value_TGV.transpose(0, 1))

    def clear(self, block_ids: list[int]) -> None:
        """Zero blocks that are handed out anew.

        Slots that the new owner has not written yet are masked, but a mask only adds to scores and scales values:
        what an old owner left there may be NaN, and would stay NaN.
        """
        (blocks,) = upload(self.device, np.array(block_ids, np.int64))
        for slots in (*self._keys.values(), *self._values.values()):
            self._by_block(slots).index_fill_(1, blocks, 0)

    def read_blocks(self, layer: int, blocks_BN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[B, G, C, D]` and values `[B, G, C, V]` of whole blocks in this order, C = N * block_size."""
        return (
            self._gather(self._keys[layer], blocks_BN),
            self._gather(self._values[layer], blocks_BN),
        )

    def read_slots(self, layer: int, slots_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[G, C, D]` and values `[G, C, V]` of single slots."""
        return (
            self._keys[layer].index_select(1, slots_C),
            self._values[layer].index_select(1, slots_C),
        )

    def value_dim(self, layer: int) -> int:
        """Size of a value head of this layer."""
        return self._values[layer].shape[-1]

    def _by_block(self, slots: torch.Tensor) -> torch.Tensor:
        """One long row per head and block: whole blocks are then copied instead of single tokens."""
        num_heads, num_slots, dim = slots.shape
        return slots.view(num_heads, num_slots // self._block_size, self._block_size * dim)

    def _gather(self, slots: torch.Tensor, blocks_BN: torch.Tensor) -> torch.Tensor:
        num_heads, _, dim = slots.shape
        gathered = self._by_block(slots).index_select(1, blocks_BN.view(-1))
        return gathered.view(num_heads, len(blocks_BN), -1, dim).transpose(0, 1)


def bytes_per_token(shapes: dict[int, KVShape], dtype: torch.dtype) -> int:
    """Bytes that one token takes in the pool, all layers."""
    return sum(shape.numel for shape in shapes.values()) * dtype.itemsize
