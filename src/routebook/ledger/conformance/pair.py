"""A ledger and its oracle, told the same, a fake model whose ids are tags, and a fake KV pool.

Legend of shape suffixes: T = rows, R = requests of a step, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routebook.ledger.base import Ledger, ReleaseReason, RouteIds, RowRange, StepRows
from routebook.ledger.conformance.kv_pool import FakeKVPool
from routebook.ledger.conformance.oracle import DictOracle
from routebook.ledger.recompute import EARLIEST
from routebook.routes.provenance import Origin
from routebook.routes.schema import RouteSchema

NUM_BLOCKS = 1024
"""Blocks of the KV pool unless a test says otherwise."""
TAG_SCHEMA = RouteSchema(layer_ids=(1, 2, 5), num_experts=65536, top_k=4, num_hidden_layers=6)
"""Its ids are tags `(request, position, layer, forward)`: a row in a wrong place names where it belongs."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step between its plan and its rows."""

    pieces: tuple[tuple[str, int, int], ...]
    """`(request, start, count)` in batch order."""
    runs: tuple[int, ...]
    version: int


class LedgerPair:
    """A ledger and its oracle, told the same; `compare` finds where they differ.

    The ledger's schema must be `TAG_SCHEMA`. Every plan takes KV blocks from a fake pool of `num_blocks`, which the
    ledger must have room for; what the pool evicts is withdrawn.
    """

    def __init__(self, ledger: Ledger, num_blocks: int = NUM_BLOCKS) -> None:
        assert ledger.schema == TAG_SCHEMA, "the tags need four columns of uint16"
        self.ledger = ledger
        self.oracle = DictOracle(ledger.block_size, ledger.recompute)
        self.pool = FakeKVPool(num_blocks)
        self._number_of: dict[str, int] = {}
        self._forwards = 0

    def chosen(self, earliest: Sequence[int], latest: Sequence[int]) -> list[int]:
        """What a test expects of a ledger that makes this choice."""
        return list(earliest if self.ledger.recompute == EARLIEST else latest)

    def begin(self, request_id: str, num_prompt_tokens: int) -> None:
        """Start a request."""
        self.ledger.begin(request_id, num_prompt_tokens)
        self.oracle.begin(request_id, num_prompt_tokens)

    def share(self, request_id: str, block_hashes: Sequence[bytes]) -> None:
        """Take blocks from the prefix cache."""
        self.ledger.share(request_id, block_hashes)
        self.oracle.share(request_id, block_hashes)
        blocks, evicted = self.pool.share(request_id, block_hashes)
        self.withdraw(*evicted)
        self.ledger.assign(request_id, blocks)

    def publish(self, request_id: str, block_index: int, block_hash: bytes) -> None:
        """Publish a block."""
        self._cover(request_id, block_index + 1)
        self.pool.name(request_id, block_index, block_hash)
        self.ledger.publish(request_id, block_index, block_hash)
        self.oracle.publish(request_id, block_hash)

    def withdraw(self, *block_hashes: bytes) -> None:
        """Evict blocks."""
        self.ledger.withdraw(block_hashes)
        self.oracle.withdraw(block_hashes)
        self.pool.forget(block_hashes)

    def reset(self) -> None:
        """Reset the prefix cache."""
        self.ledger.reset()
        published = list(self.oracle.published)
        self.oracle.withdraw(published)
        self.pool.forget(published)

    def release(self, request_id: str, reason: ReleaseReason) -> None:
        """Preempt or end a request, and free its blocks."""
        self.ledger.release(request_id, reason)
        self.oracle.release(request_id, preempted=reason is ReleaseReason.PREEMPTED)
        self.pool.release(request_id)

    def plan(self, *pieces: tuple[str, int, int], version: int = 0) -> PlannedStep:
        """Plan a step of pieces `(request, start, count)`, in the present run of each."""
        for request_id, start, count in pieces:
            self._cover(request_id, -(-(start + count) // self.ledger.block_size))
        runs = tuple(self.oracle.run(request_id) for request_id, _, _ in pieces)
        return PlannedStep(pieces, runs, version)

    def store(self, step: PlannedStep, *, tell_runs: bool = True) -> None:
        """Run a planned step on a fake model and store its rows."""
        rows = self.run_model(step, tell_runs=tell_runs)
        self.ledger.store_batch(rows)
        self.note(step, rows)

    def note(self, step: PlannedStep, rows: StepRows) -> None:
        """Tell the oracle what a planned step computed."""
        ids = iter(rows.ids_TLK.tolist())
        for (request_id, start, count), run in zip(step.pieces, step.runs, strict=True):
            for position in range(start, start + count):
                self.oracle.store(request_id, run, position, next(ids), step.version)

    def step(self, *pieces: tuple[str, int, int], version: int = 0) -> None:
        """Plan a step and store it at once."""
        self.store(self.plan(*pieces, version=version), tell_runs=False)

    def run_model(self, step: PlannedStep, *, tell_runs: bool = True) -> StepRows:
        """Tagged rows of a step, in a new forward."""
        self._forwards += 1
        tags: list[npt.NDArray[np.int64]] = []
        for request_id, start, count in step.pieces:
            number = self._number_of.setdefault(request_id, len(self._number_of))
            for position in range(start, start + count):
                layers = np.array(TAG_SCHEMA.layer_ids)
                fixed = [np.full(len(layers), v) for v in (number, position, self._forwards)]
                tags.append(np.stack([fixed[0], fixed[1], layers, fixed[2]], axis=1))
        ids_TLK: RouteIds = np.array(tags).reshape(TAG_SCHEMA.shape(-1)).astype(TAG_SCHEMA.dtype)
        return StepRows(
            request_ids=[request_id for request_id, _, _ in step.pieces],
            starts_R=np.array([start for _, start, _ in step.pieces], np.int64),
            counts_R=np.array([count for _, _, count in step.pieces], np.int64),
            ids_TLK=ids_TLK,
            weight_version=step.version,
            runs_R=np.array(step.runs, np.int64) if tell_runs else None,
        )

    def compare(self, num_positions: int) -> None:
        """Compare every row of every living request below `num_positions`, then recount the ledger."""
        for request_id in self.oracle.living:
            self.compare_range(request_id, 0, num_positions)
        usage = self.ledger.usage()
        assert usage.requests == len(self.oracle.living), usage
        assert usage.published == len(self.oracle.published), usage
        self.ledger.check_integrity()

    def compare_range(self, request_id: str, start: int, stop: int) -> RowRange:
        """Compare one read with the oracle and return it."""
        rows = self.ledger.read(request_id, start, stop)
        assert rows.start == start
        assert rows.ids_TLK.shape == TAG_SCHEMA.shape(stop - start), rows.ids_TLK.shape
        assert rows.ids_TLK.dtype == TAG_SCHEMA.dtype
        assert rows.origin_T.shape == rows.version_T.shape == (stop - start,)
        for i, position in enumerate(range(start, stop)):
            place = f"row {position} of {request_id!r}"
            expected = self.oracle.row(request_id, position)
            origin = Origin(int(rows.origin_T[i]))
            if expected is None:
                assert origin is Origin.ABSENT, f"{place} should be absent, is {origin!r}"
                assert (rows.ids_TLK[i] == TAG_SCHEMA.absent).all(), f"{place} is absent, has ids"
                assert rows.version_T[i] == 0, f"{place} is absent, has a version"
                continue
            got = rows.ids_TLK[i].tolist()
            assert got == expected.ids, f"{place}: got {got}, expected {expected.ids}"
            assert origin is expected.origin, f"{place}: {origin!r}, expected {expected.origin!r}"
            assert rows.version_T[i] == expected.version, f"{place}: version {rows.version_T[i]}"
        return rows

    def _cover(self, request_id: str, num_blocks: int) -> None:
        blocks, evicted = self.pool.cover(request_id, num_blocks)
        self.withdraw(*evicted)
        self.ledger.assign(request_id, blocks)
