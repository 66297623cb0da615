"""Blocks of which a request has more than one chunk: computed in several runs, or shared and computed.

Legend of shape suffixes: D = layers of one block, B = block_size, C = chunks or blocks, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from routebook.ledger.base import RouteIds
from routebook.ledger.block_layers import BlockLayers, Layer
from routebook.ledger.chunk_table import NONE, ChunkTable
from routebook.ledger.recompute import EARLIEST
from routebook.ledger.row_pool import RowPool
from routebook.routes.provenance import ABSENT, Origin

Dropped = list[tuple[int, Layer]]
"""Block and layer that a request has no more; the reference is the caller's to give up."""


class LayeredBlocks:
    """What to do with layers, under one choice of whose rows win.

    Args:
        table: which chunks the requests hold.
        pool: their rows.
        recompute: one of `RECOMPUTE`.
    """

    def __init__(self, table: ChunkTable, pool: RowPool, recompute: str) -> None:
        self._table = table
        self._pool = pool
        self._recompute = recompute

    def chunk_of_run(self, row: int, block: int, run: int) -> int:
        """The chunk for what a run computes of a block that has another chunk; `NONE` if nobody will see it."""
        if self._is_useless(row, block, run):
            return NONE
        layers = self._table.layers_of(row, block)
        chunk = layers.own_chunk(run)
        if chunk is None:
            before = [x for x in self._table.peek(row, block - 1) if x.run == run] if block else []
            chunk = self._pool.allocate_one(before[0].chunk if before else NONE)
            self._add(layers, Layer(run, False, chunk))
        return chunk

    def take_hit(self, row: int, block: int, run: int, chunk: int) -> None:
        """A run took a block, of which the request has a chunk, from the prefix cache."""
        held = self._table.peek(row, block)
        if self._recompute == EARLIEST and (
            self._any_complete(held) or any(layer.chunk == chunk for layer in held)
        ):
            return
        self._pool.retain_one(chunk)
        self._add(self._table.layers_of(row, block), Layer(run, True, chunk))

    def decline(self, row: int, block: int) -> Dropped:
        """The hash of a block is taken: what the current run computes is of no use behind complete rows."""
        run = int(self._table.run_N[row])
        earlier = [layer for layer in self._table.peek(row, block) if layer.run < run]
        if self._recompute != EARLIEST or not self._any_complete(earlier):
            return []
        self._table.declined.add((row, block))
        if len(earlier) == len(self._table.peek(row, block)):
            return []
        return self._cut(block, self._table.layers_of(row, block), len(earlier))

    def prune(self, row: int) -> Dropped:
        """A run ended: drop what can never be read any more."""
        dropped: Dropped = []
        for block, layers in list(self._table.layers.get(row, {}).items()):
            complete_D = self._complete(layers.layers)
            if complete_D.any():
                dropped += self._prune(block, layers, complete_D)
            if len(layers.layers) == 1 and not layers.replaced:
                self._table.settle(row, block)
        return dropped

    def whole(self, row: int, blocks: Sequence[int]) -> dict[int, tuple[int, Origin]]:
        """Of blocks that need one chunk only to be read: that chunk, and the origin of all its rows.

        The origin is `ABSENT` where the chunk itself says it for each row.
        """
        held = [self._table.layers_of(row, block) for block in blocks]
        complete_C = self._complete([layers.layers[0] for layers in held])
        found = {}
        for block, layers, complete in zip(blocks, held, complete_C.tolist(), strict=True):
            if complete and (origin := self._origin_of_all(layers)) is not None:
                found[block] = layers.layers[0].chunk, origin
        return found

    def read(
        self, row: int, block: int
    ) -> tuple[RouteIds, npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """The rows of one block, each from the first layer that has it: ids `[B, L, K]`, origins, versions."""
        layers = self._table.layers_of(row, block)
        depth, size = len(layers.layers), self._pool.block_size
        chunks_D = np.array([layer.chunk for layer in layers.layers])
        ids, origin, version = self._pool.read(chunks_D)
        origin_DB = origin.reshape(depth, size)
        for d, layer in enumerate(layers.layers):
            if layer.shared:
                origin_DB[d, origin_DB[d] != ABSENT] = Origin.PREFIX_CACHE
        present_DB = origin_DB != ABSENT
        first_B, at = present_DB.argmax(axis=0), np.arange(size)
        origin_B = origin_DB[first_B, at]
        if self._recompute != EARLIEST:
            again_B = (present_DB.sum(axis=0) > 1) | layers.replaced
            own_B = (origin_B == Origin.PREFILL) | (origin_B == Origin.DECODE)
            origin_B[again_B & own_B] = Origin.RECOMPUTED
        ids_BLK: RouteIds = ids.reshape(depth, size, *ids.shape[1:])[first_B, at]
        return ids_BLK, origin_B, version.reshape(depth, size)[first_B, at]

    def _origin_of_all(self, layers: BlockLayers) -> Origin | None:
        """The origin of the rows of a complete first layer; None if it is not one for all."""
        best, *rest = layers.layers
        if best.shared:
            return Origin.PREFIX_CACHE
        if self._recompute == EARLIEST or not (rest or layers.replaced):
            return Origin.ABSENT
        return Origin.RECOMPUTED if layers.replaced or self._any_complete(rest) else None

    def _add(self, layers: BlockLayers, layer: Layer) -> None:
        layers.layers.append(layer)
        layers.layers.sort(key=self._rank)

    def _prune(self, block: int, layers: BlockLayers, complete_D: npt.NDArray[np.bool_]) -> Dropped:
        keep = int(complete_D.argmax()) + 1
        best, rest = layers.layers[keep - 1], complete_D[keep:]
        if self._recompute != EARLIEST and len(rest) and not best.shared:
            # Where earlier rows were there is to be known still.
            if not (layers.replaced or rest.any()):
                return []
            layers.replaced = True
        return self._cut(block, layers, keep)

    def _cut(self, block: int, layers: BlockLayers, keep: int) -> Dropped:
        dropped = layers.layers[keep:]
        del layers.layers[keep:]
        return [(block, layer) for layer in dropped]

    def _is_useless(self, row: int, block: int, run: int) -> bool:
        """Whether what a run computes for a block will neither be published nor read."""
        table = self._table
        if run == table.run_N[row]:
            if (row, block) in table.declined:
                return True
            if block >= table.hit_blocks_N[row]:
                return False
        rank = self._rank(Layer(run, False, NONE))
        return self._any_complete([x for x in table.peek(row, block) if self._rank(x) < rank])

    def _rank(self, layer: Layer) -> tuple[int, bool]:
        """The lower, the sooner chosen; what a run took goes before what it computes there all the same."""
        return layer.run if self._recompute == EARLIEST else -layer.run, not layer.shared

    def _any_complete(self, layers: list[Layer]) -> bool:
        return bool(self._complete(layers).any())

    def _complete(self, layers: list[Layer]) -> npt.NDArray[np.bool_]:
        return self._pool.complete(np.array([layer.chunk for layer in layers], np.int64))
