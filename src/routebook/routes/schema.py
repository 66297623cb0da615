"""What the axes of routed experts mean: which layers, how many experts, how many picks.

Legend of shape suffixes: T = tokens (rows), L = MoE layers, K = top-k, H = hidden layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from routebook.errors import SchemaMismatchError

_UINT8_EXPERTS = 256
_UINT16_EXPERTS = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteSchema:
    """The meaning of an array `[rows, num_moe_layers, top_k]` of logical expert ids.

    Raises:
        SchemaMismatchError: the numbers contradict each other.
    """

    layer_ids: tuple[int, ...]
    """Decoder layer of each entry of the layer axis, ascending; dense layers do not occur."""

    num_experts: int
    """Number of experts a router chooses from; ids are below it."""

    top_k: int
    """Experts picked per token and layer."""

    num_hidden_layers: int
    """All decoder layers of the model, dense ones included; formats that list them all need it."""

    def __post_init__(self) -> None:
        # Equality and hashing need one type, also where a list or numpy numbers were given.
        object.__setattr__(self, "layer_ids", tuple(int(layer) for layer in self.layer_ids))
        ordered = all(a < b for a, b in pairwise(self.layer_ids))
        if not self.layer_ids or not ordered or self.layer_ids[0] < 0:
            raise SchemaMismatchError(f"layer_ids={self.layer_ids} must be ascending, not empty")
        if self.layer_ids[-1] >= self.num_hidden_layers:
            raise SchemaMismatchError(
                f"layer {self.layer_ids[-1]} does not exist in a model of "
                f"{self.num_hidden_layers} hidden layers"
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise SchemaMismatchError(f"top_k={self.top_k} of num_experts={self.num_experts}")
        if self.num_experts > _UINT16_EXPERTS:
            raise SchemaMismatchError(f"num_experts={self.num_experts} exceeds {_UINT16_EXPERTS}")

    @property
    def num_layers(self) -> int:
        """Length of the layer axis."""
        return len(self.layer_ids)

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """`uint8` up to 256 experts, else `uint16`: from the model, never from the data."""
        return np.dtype(np.uint8 if self.num_experts <= _UINT8_EXPERTS else np.uint16)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of ids."""
        return self.num_layers * self.top_k * self.dtype.itemsize

    @property
    def absent(self) -> int:
        """What fills an absent row. It may be a valid id: only the validity mask tells."""
        return int(np.iinfo(self.dtype).max)

    def shape(self, num_rows: int) -> tuple[int, int, int]:
        """Shape `[num_rows, L, K]` of an array of this schema."""
        return (num_rows, self.num_layers, self.top_k)
