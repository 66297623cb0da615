"""What a ledger must answer, told by dictionaries of single rows: slow, and without chunks, counts or arrays.

It keeps every row that was ever computed, by who computed it in which run, and derives the rest from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from routebook.routes.provenance import Origin


@dataclass(frozen=True, slots=True)
class OracleRow:
    """One row: ids as nested lists `[L][K]`, origin, weight version."""

    ids: list[list[int]]
    origin: Origin
    version: int


@dataclass(slots=True)
class _Life:
    """One request from `begin` to its end."""

    prompt_tokens: int
    run: int = 0
    own: dict[int, OracleRow] = field(default_factory=dict)
    borrowed: dict[int, tuple[int, dict[int, OracleRow]]] = field(default_factory=dict)
    """Position -> run in which it was taken, and the rows of the run that made the block, by position."""
    made: dict[int, dict[int, OracleRow]] = field(default_factory=dict)
    """Run -> position -> row, for every row that the run computed."""

    def borrowed_row(self, position: int) -> OracleRow | None:
        _, made = self.borrowed.get(position, (0, {}))
        row = made.get(position)
        return row and OracleRow(row.ids, Origin.PREFIX_CACHE, row.version)


class DictOracle:
    """The contract of :class:`~routebook.ledger.base.Ledger`, row by row."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.living: dict[str, _Life] = {}
        self.published: dict[bytes, dict[int, OracleRow]] = {}
        # The dead are kept: their last steps may still be on the way.
        self._last: dict[str, _Life] = {}

    def begin(self, request_id: str, num_prompt_tokens: int) -> None:
        """Start a request."""
        self.living[request_id] = self._last[request_id] = _Life(num_prompt_tokens)

    def run(self, request_id: str) -> int:
        """The current, or last, run of a request."""
        return self._last[request_id].run

    def share(self, request_id: str, block_hashes: Sequence[bytes]) -> None:
        """Borrow positions that the request has from nowhere else."""
        life = self.living[request_id]
        for block, block_hash in enumerate(block_hashes):
            if block_hash in self.published:
                made = self.published[block_hash]
                for position in self._positions(block):
                    if position not in life.own:
                        life.borrowed.setdefault(position, (life.run, made))

    def publish(self, request_id: str, block_hash: bytes) -> None:
        """Name the rows that the current run made, those to come included; the first publisher stays."""
        life = self.living[request_id]
        self.published.setdefault(block_hash, life.made.setdefault(life.run, {}))

    def withdraw(self, block_hashes: Sequence[bytes]) -> None:
        """Forget hashes."""
        for block_hash in block_hashes:
            self.published.pop(block_hash, None)

    def available(self, block_hashes: Sequence[bytes]) -> int:
        """Leading hashes that are published."""
        missing = [i for i, h in enumerate(block_hashes) if h not in self.published]
        return missing[0] if missing else len(block_hashes)

    def store(
        self, request_id: str, run: int, position: int, ids: list[list[int]], version: int
    ) -> None:
        """One row of a step; requests that never lived are skipped."""
        life = self._last.get(request_id)
        if life is None:
            return
        origin = Origin.PREFILL if position < life.prompt_tokens else Origin.DECODE
        row = OracleRow(ids, origin, version)
        life.made.setdefault(run, {}).setdefault(position, row)
        taken_in, _ = life.borrowed.get(position, (run + 1, {}))
        if taken_in <= run and life.borrowed_row(position) is not None:
            return
        life.own.setdefault(position, row)

    def release(self, request_id: str, *, preempted: bool) -> None:
        """The next run of a request, or its end."""
        if preempted:
            self.living[request_id].run += 1
        else:
            del self.living[request_id]

    def row(self, request_id: str, position: int) -> OracleRow | None:
        """The row of a living request, or None if it is absent."""
        life = self.living[request_id]
        return life.own.get(position) or life.borrowed_row(position)

    def _positions(self, block: int) -> range:
        return range(block * self.block_size, (block + 1) * self.block_size)
