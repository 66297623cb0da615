"""Positions for the one family that counts rows instead of reading `position_ids`.

Llama 4 scales the queries of its layers without rotary embedding by the logarithm of their position, and takes that
position to be the row's number plus the length of the cache. In a packed batch a row's number says nothing. So the
model gets a cache that holds nothing and answers, row by row, by how much the position is off.
"""

from __future__ import annotations

from typing import Any

import torch


class PackedPositions:
    """Answers `get_seq_length` with a tensor: position minus row number, for every row of the packed batch."""

    def __init__(self, positions_T: torch.Tensor) -> None:
        self._offsets_T = positions_T - torch.arange(len(positions_T), device=positions_T.device)

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """What to add to each row's number."""
        return self._offsets_T

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing is kept here: keys and values go to the paged pool."""
        return key, value


def counts_rows(model: torch.nn.Module) -> bool:
    """Whether the model derives positions from row numbers."""
    return any(getattr(module, "attn_temperature_tuning", False) for module in model.modules())
