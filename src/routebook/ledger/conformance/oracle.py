"""What a ledger must answer, told by dictionaries of single rows: slow, and without chunks, counts or arrays.

It keeps every row that was ever computed, by who computed it in which run, and derives the rest from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from routebook.ledger.recompute import EARLIEST
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
    made: dict[int, dict[int, OracleRow]] = field(default_factory=dict)
    """Run -> position -> row, for every row that the run computed."""
    taken: dict[int, list[tuple[int, dict[int, OracleRow]]]] = field(default_factory=dict)
    """Position -> runs in which it was taken from the prefix cache, and the rows of the run that made the block."""

    def candidates(self, position: int) -> list[tuple[int, OracleRow]]:
        """Run and row of all that there is for a position, a row that was taken before an own one of that run."""
        shared = [
            (run, OracleRow(made[position].ids, Origin.PREFIX_CACHE, made[position].version))
            for run, made in self.taken.get(position, ())
            if position in made
        ]
        own = [(run, made[position]) for run, made in self.made.items() if position in made]
        return sorted(shared + own, key=lambda found: found[0])


class DictOracle:
    """The contract of :class:`~routebook.ledger.base.Ledger`, row by row."""

    def __init__(self, block_size: int, recompute: str) -> None:
        self.block_size = block_size
        self.recompute = recompute
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
        """Take what is published."""
        life = self.living[request_id]
        for block, block_hash in enumerate(block_hashes):
            if block_hash in self.published:
                made = self.published[block_hash]
                for position in self._positions(block):
                    life.taken.setdefault(position, []).append((life.run, made))

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

    def release(self, request_id: str, *, preempted: bool) -> None:
        """The next run of a request, or its end."""
        if preempted:
            self.living[request_id].run += 1
        else:
            del self.living[request_id]

    def row(self, request_id: str, position: int) -> OracleRow | None:
        """The row of a living request, or None if it is absent."""
        found = self.living[request_id].candidates(position)
        if not found or self.recompute == EARLIEST:
            return found[0][1] if found else None
        last = found[-1][0]
        row = next(row for run, row in found if run == last)
        if row.origin is Origin.PREFIX_CACHE or found[0][0] == last:
            return row
        return OracleRow(row.ids, Origin.RECOMPUTED, row.version)

    def _positions(self, block: int) -> range:
        return range(block * self.block_size, (block + 1) * self.block_size)
