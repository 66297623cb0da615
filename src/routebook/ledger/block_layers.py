"""What a request has of one block when that is more than one chunk: a layer for each run that made or took one.

A layer is pure: the rows of one run of one request. A position has the row of the first layer that has one, in the
order of the ledger's choice (`recompute.py`); so it does not matter in which order the rows came.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Layer:
    """A chunk of rows that one run computed for a block, or took for it from the prefix cache."""

    run: int
    shared: bool
    """Taken from the prefix cache; otherwise this request's run writes it."""
    chunk: int


@dataclass(slots=True)
class BlockLayers:
    """The layers of one block of one request, best first."""

    layers: list[Layer] = field(default_factory=list)
    replaced: bool = False
    """A complete layer of an earlier run was dropped, behind one that was chosen over all of it."""

    def own_chunk(self, run: int) -> int | None:
        """The chunk that a run of this request writes, if it has one."""
        for layer in self.layers:
            if layer.run == run and not layer.shared:
                return layer.chunk
        return None
