"""The tensors behind the KV blocks, one pair per attention layer.

Legend of shape suffixes: S = slots of the pool, G = KV heads, D = size of a key head, V = size of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
    """Keys and values of every attention layer: `[S, G, D + V]`, a key and its value side by side.

    Slot = block_id * block_size + offset. One tensor for both, so that reading a block is one copy.
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
        self._shapes = shapes
        # Zeros, not empty: see `clear`.
        self._slots = {
            layer: torch.zeros(
                num_blocks * block_size,
                shape.num_kv_heads,
                shape.key_dim + shape.value_dim,
                dtype=dtype,
                device=device,
            )
            for layer, shape in shapes.items()
        }

    def write(
        self, layer: int, slots_T: torch.Tensor, key_TGD: torch.Tensor, value_TGV: torch.Tensor
    ) -> None:
        """Store a step's keys and values of one layer."""
        self._slots[layer].index_copy_(0, slots_T, torch.cat((key_TGD, value_TGV), dim=-1))

    def clear(self, block_ids: list[int]) -> None:
        """Zero blocks that are handed out anew.

        Slots that the new owner has not written yet are masked, but a mask only adds to scores and scales values:
        what an old owner left there may be NaN, and would stay NaN.
        """
        blocks = torch.tensor(block_ids, device=self.device)
        for slots in self._slots.values():
            slots.view(-1, self._block_size, *slots.shape[1:]).index_fill_(0, blocks, 0)

    def read_blocks(self, layer: int, blocks_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[N * block_size, G, D]` and values `[N * block_size, G, V]` of whole blocks, in this order."""
        slots = self._slots[layer]
        # One long row per block: index_select then copies whole blocks instead of single tokens.
        blocks = slots.view(-1, self._block_size * slots.shape[1] * slots.shape[2])
        gathered = blocks.index_select(0, blocks_N).view(-1, *slots.shape[1:])
        return self._split(layer, gathered)

    def read_slots(self, layer: int, slots_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[C, G, D]` and values `[C, G, V]` of single slots."""
        return self._split(layer, self._slots[layer].index_select(0, slots_C))

    def value_dim(self, layer: int) -> int:
        """Size of a value head of this layer."""
        return self._shapes[layer].value_dim

    def _split(self, layer: int, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key_dim = self._shapes[layer].key_dim
        return both[..., :key_dim], both[..., key_dim:]


def bytes_per_token(shapes: dict[int, KVShape], dtype: torch.dtype) -> int:
    """Bytes that one token takes in the pool, all layers."""
    return sum(shape.numel for shape in shapes.values()) * dtype.itemsize
