"""Which chunks the living requests hold, as arrays over `[request row, block]` that grow in both directions.

Legend of shape suffixes: N = table rows, M = blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from routebook.ledger.block_layers import BlockLayers, Layer
from routebook.ledger.request_table import RequestTable
from routebook.ledger.spans import Index

NONE = -1
"""No chunk here."""
LAYERED = 2**31 - 1
"""In `shared`: the block has several chunks; they are in `layers`."""

Table = npt.NDArray[np.int32]

_FIELDS = 4


class ChunkTable(RequestTable):
    """The chunks of each request. The attributes are views that growth replaces: never keep one."""

    own_NM: Table
    """The request's own chunk of each block: only the request itself writes to it."""
    home_NM: Table
    """The run whose rows, and no others, the own chunk holds."""
    shared_NM: Table
    """The chunk taken from the prefix cache, if there is no own one: never written through this table."""
    shared_run_NM: Table
    """The run in which it was taken."""

    def __init__(self, rows: int = 16, blocks: int = 64) -> None:
        super().__init__(rows)
        self._data = np.full((_FIELDS, rows, blocks), NONE, np.int32)
        self.hit_blocks_N: Index = np.zeros(rows, np.int64)
        """Leading blocks that the current run took from the prefix cache."""
        self.layers: dict[int, dict[int, BlockLayers]] = {}
        """By table row and block, for blocks with more than one chunk."""
        self.declined: set[tuple[int, int]] = set()
        """Table row and block where what the current run computes again is of no use."""
        self.sharers: set[int] = set()
        """Table rows with a shared chunk, or with layers."""
        self._bind()

    @property
    def num_blocks(self) -> int:
        """Blocks per row that there is room for."""
        return self._data.shape[2]

    def start_run(self, row: int) -> None:
        """The request was preempted: its next run begins without prefix hits."""
        self.run_N[row] += 1
        self._forget_run(row)

    def reach(self, num_blocks: int) -> None:
        """Have at least `num_blocks` blocks per row."""
        more = num_blocks - self._data.shape[2]
        if more > 0:
            self._pad(0, max(more, self._data.shape[2]))

    def peek(self, row: int, block: int) -> list[Layer]:
        """The layers of a block, best first."""
        if block in self.layers.get(row, ()):
            return self.layers[row][block].layers
        own, home, shared, shared_run = self.view(row, block, block + 1)[:, 0].tolist()
        if own >= 0:
            return [Layer(home, False, own)]
        return [Layer(shared_run, True, shared)] if shared >= 0 else []

    def layers_of(self, row: int, block: int) -> BlockLayers:
        """The layers of a block, which from now on may be several."""
        blocks = self.layers.setdefault(row, {})
        if block not in blocks:
            one = self.peek(row, block)
            blocks[block] = BlockLayers(one)
            self.own_NM[row, block] = self.home_NM[row, block] = NONE
            self.shared_NM[row, block] = LAYERED
            self.sharers.add(row)
        return blocks[block]

    def settle(self, row: int, block: int) -> None:
        """The block is back to one layer, and can do without the list of them."""
        (layer,) = self.layers[row].pop(block).layers
        fields = NONE, NONE, layer.chunk, layer.run
        if not layer.shared:
            fields = layer.chunk, layer.run, NONE, NONE
        self.view(row, block, block + 1)[:, 0] = fields

    def held(self) -> list[int]:
        """Every chunk that a request holds, as often as it does."""
        own: list[int] = self.own_NM[self.own_NM >= 0].tolist()
        shared = self.shared_NM[(self.shared_NM >= 0) & (self.shared_NM != LAYERED)]
        layers = (block.layers for blocks in self.layers.values() for block in blocks.values())
        return [*own, *shared.tolist(), *(layer.chunk for some in layers for layer in some)]

    def view(self, row: int, first: int, stop: int) -> Table:
        """Views of the fields `own, home, shared, shared_run` of blocks `[first, stop)`, int32 `[4, M]`."""
        return self._data[:, row, first:stop]

    def take(self, row_S: Index, block_S: Index) -> Table:
        """Copies of the fields `own, home, shared, shared_run` at some places, int32 `[4, S]`."""
        where_S = row_S * self._data.shape[2] + block_S
        return self._data.reshape(_FIELDS, -1).take(where_S, axis=1)

    def _pad_rows(self, rows: int) -> None:
        self.hit_blocks_N = np.pad(self.hit_blocks_N, (0, rows))
        self._pad(rows, 0)

    def _empty(self, row: int) -> None:
        # The chunks are the caller's affair.
        self._data[:, row] = NONE
        self.layers.pop(row, None)
        self.sharers.discard(row)
        self._forget_run(row)

    def _forget_run(self, row: int) -> None:
        self.hit_blocks_N[row] = 0
        self.declined = {place for place in self.declined if place[0] != row}

    def _is_empty(self, row: int) -> bool:
        return bool((self._data[:, row] == NONE).all()) and row not in self.layers

    def _pad(self, rows: int, blocks: int) -> None:
        self._data = np.pad(self._data, ((0, 0), (0, rows), (0, blocks)), constant_values=NONE)
        self._bind()

    def _bind(self) -> None:
        self.own_NM, self.home_NM, self.shared_NM, self.shared_run_NM = self._data
