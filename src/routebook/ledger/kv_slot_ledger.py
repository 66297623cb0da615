"""Rows that lie where the KV blocks lie, and snapshots for what outlives them.

A row goes to the slot of its token, so that a prefix hit finds the rows of its blocks without a word. What the KV
pool does to a block is what happens to its rows, hence two things beside the slots: leases, which prove whose row a
slot holds (`slot_rows.py`), and snapshots, taken before the blocks of a preempted request are freed and completed
when its late rows come (`snapshot_cache.py`). Where the rows of a request are::

    snapshot    rows of earlier runs, own or shared, and rows that have no slot
    slot        behind the prefix hits: written by the current run under the block's lease
                in a prefix hit: written by whoever computed the block, read under the lease that was shared

Of two rows the ledger's choice is read (`recompute.py`): the snapshot has those of the earlier runs. The slots get all
rows that the current run computes, as they made the KV that exists now: `publish` names the block, and needs no copy.

Legend of shape suffixes: R = requests of a step, S = segments of a step, T = rows, M = blocks, N = table rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routebook.config import check_at_least, option
from routebook.errors import IntegrityError, LedgerError
from routebook.ledger.base import (
    LedgerUsage,
    ReleaseReason,
    RouteIds,
    RowRange,
    StepRows,
)
from routebook.ledger.block_tables import BlockTables
from routebook.ledger.recompute import check_recompute, recompute_option
from routebook.ledger.request_table import NOBODY
from routebook.ledger.slot_rows import NO_LEASE, RoutedExpertsManager, block_of
from routebook.ledger.snapshot_cache import PendingBlock, RoutedExpertsCache
from routebook.ledger.spans import Index
from routebook.ledger.step_ledger import StepLedger
from routebook.ledger.step_log import LoggedSteps
from routebook.ledger.step_segments import StepSegments, run_origins
from routebook.routes.provenance import ABSENT, Origin
from routebook.routes.schema import RouteSchema


@dataclass(frozen=True, kw_only=True)
class KVSlotConfig:
    """Options of :class:`KVSlotLedger`."""

    initial_requests: int = option(
        "living requests the block tables have room for at the start (256 by default); they grow",
        default=256,
    )
    recompute: str = recompute_option()

    def __post_init__(self) -> None:
        check_at_least("initial_requests", self.initial_requests, 1)
        check_recompute(self.recompute)


class KVSlotLedger(StepLedger):
    """A ledger whose rows lie in the slots of the KV pool; see the head of this file.

    Args:
        schema: layers, top-k and dtype of a row.
        block_size: tokens per KV block, at least 1.
        num_blocks: blocks of the KV pool, at least 1; block ids lie in `[0, num_blocks)`.
        config: options, the defaults if None.

    Raises:
        ConfigError: `block_size` or `num_blocks` is below 1.
    """

    def __init__(
        self,
        schema: RouteSchema,
        block_size: int,
        num_blocks: int,
        config: KVSlotConfig | None = None,
    ) -> None:
        check_at_least("num_blocks", num_blocks, 1)
        config = config or KVSlotConfig()
        self._tables = BlockTables(config.initial_requests)
        super().__init__(schema, block_size, self._tables, config.recompute)
        self._slots = RoutedExpertsManager(schema, block_size, num_blocks)
        self._cache = RoutedExpertsCache(schema, block_size, config.recompute)
        self._named_P = np.zeros(num_blocks, np.bool_)
        """Blocks published under their present lease, also if withdrawn since: others may read them."""

    def share(self, request_id: str, block_hashes: Sequence[bytes]) -> None:
        """Take leading blocks from the prefix cache; see :meth:`Ledger.share`."""
        row, tables, count = self._tables.row(request_id), self._tables, len(block_hashes)
        if tables.assigned_N[row]:
            raise LedgerError(f"{request_id!r} has blocks already in this run; share before assign")
        tables.reach(count)
        tables.hits_N[row] = count
        lease_M = np.array([self._find(h) for h in block_hashes], np.int64)
        tables.lease_NM[row, :count] = lease_M

    def assign(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Extend the block table, and lease what the pool handed out; see :meth:`Ledger.assign`."""
        row, tables = self._tables.row(request_id), self._tables
        self._check_blocks(request_id, block_ids)
        first, count = int(tables.assigned_N[row]), len(block_ids)
        blocks_M = np.array(block_ids, np.int64)
        num_hits = min(max(int(tables.hits_N[row]) - first, 0), count)
        if num_hits:
            self._check_hits(request_id, row, first, blocks_M[:num_hits])
        tables.assigned_N[row] += count
        if num_hits == count:
            return
        tables.reach(first + count)
        new_M = blocks_M[num_hits:]
        if self._late:
            ended = self._slots.lease_P[new_M].tolist()
            self._late.forget_chunks([e for e in ended if e not in self._cache.waiting])
        self._named_P[new_M] = False
        tables.lease_NM[row, first + num_hits : first + count] = self._slots.hand_out(new_M)

    def publish(self, request_id: str, block_index: int, block_hash: bytes) -> None:
        """Name a full block; see :meth:`Ledger.publish`."""
        row, tables = self._tables.row(request_id), self._tables
        if block_index < 0:
            raise LedgerError(f"block_index={block_index} of {request_id!r} is negative")
        if self._find(block_hash) != NO_LEASE:
            return
        if block_index < tables.hits_N[row]:
            raise LedgerError(
                f"block {block_index} of {request_id!r} came from the prefix cache; only the request"
                " that computes a block publishes it"
            )
        if block_index >= tables.assigned_N[row]:
            raise LedgerError(
                f"block {block_index} of {request_id!r} is not in its table of"
                f" {tables.assigned_N[row]} blocks; assign it first"
            )
        lease = int(tables.lease_NM[row, block_index])
        self._published[block_hash] = lease
        self._named_P[block_of(lease)] = True

    def withdraw(self, block_hashes: Sequence[bytes]) -> None:
        """Forget evicted blocks; see :meth:`Ledger.withdraw`."""
        for block_hash in block_hashes:
            self._published.pop(block_hash, None)

    def available(self, block_hashes: Sequence[bytes]) -> int:
        """Count leading published hashes; see :meth:`Ledger.available`."""
        for count, block_hash in enumerate(block_hashes):
            if self._find(block_hash) == NO_LEASE:
                return count
        return len(block_hashes)

    def read(self, request_id: str, start: int, stop: int) -> RowRange:
        """Copy rows of a living request; see :meth:`Ledger.read`."""
        row, size = self._tables.row(request_id), self.block_size
        if not 0 <= start <= stop:
            raise LedgerError(f"rows [{start}, {stop}) of {request_id!r} are not a range")
        self._write_out()
        first = start // size
        ids_TLK, origin_T, version_T = self._read_slots(row, first, -(-stop // size))
        part = slice(start - first * size, stop - first * size)
        rows = RowRange(
            start=start, ids_TLK=ids_TLK[part], origin_T=origin_T[part], version_T=version_T[part]
        )
        self._cache.get_best(request_id, rows, int(self._tables.run_N[row]))
        rows.clear_absent(self.schema.absent)
        return rows

    def release(self, request_id: str, reason: ReleaseReason) -> None:
        """Let a request wait or go, before its blocks are freed; see :meth:`Ledger.release`."""
        row = self._tables.row(request_id)
        self._close_batch()
        if reason is ReleaseReason.PREEMPTED:
            self._capture(request_id, row)
            self._tables.start_run(row)
            return
        self._forget_late(self._cache.forget(request_id))
        for block, lease in self._lacking(row):
            # Whoever shares the block, or finds it in the prefix cache, waits for its rows.
            if block >= self._tables.hits_N[row] and self._is_named(lease):
                self._expect_late(request_id, row, block, lease)
        self._tables.end(request_id)

    def reset(self) -> None:
        """Withdraw everything published; see :meth:`Ledger.reset`."""
        self._published.clear()

    def usage(self) -> LedgerUsage:
        """Count what is held; a block of a snapshot counts like one in a table. See :meth:`Ledger.usage`."""
        snapshots = self._cache.entries.values()
        kept = sum(-(-len(entry.data.origin_T) // self.block_size) for entry in snapshots)
        return LedgerUsage(
            requests=len(self._tables),
            request_chunks=int((self._tables.lease_NM != NO_LEASE).sum()) + kept,
            published=len(self._published),
            capacity_nbytes=self._slots.nbytes + self._cache.nbytes,
        )

    def check_integrity(self) -> None:
        """Recount owners, tags, snapshots and notes; see :meth:`Ledger.check_integrity`."""
        self._write_out()
        self._tables.check()
        self._check_owners()
        for block_hash, lease in self._published.items():
            if not self._is_named(lease):
                raise IntegrityError(
                    f"hash {block_hash.hex()} names a block that was handed out again"
                )
        self._slots.check()
        self._cache.check(self._tables.row_of)
        for lease in self._late:
            if not self._is_named(lease) and lease not in self._cache.waiting:
                raise IntegrityError(f"lease {lease:#x} waits for rows and belongs to nobody")

    def _find(self, block_hash: bytes) -> int:
        """The lease published under a hash, or `NO_LEASE`, also when its block was handed out since."""
        lease = self._published.get(block_hash, NO_LEASE)
        return lease if lease != NO_LEASE and self._is_named(lease) else NO_LEASE

    def _is_named(self, lease: int) -> bool:
        block = block_of(lease)
        return bool(self._slots.lease_P[block] == lease and self._named_P[block])

    def _check_blocks(self, request_id: str, block_ids: Sequence[int]) -> None:
        if not block_ids:
            return
        if len(set(block_ids)) != len(block_ids):
            raise LedgerError(f"a block occurs twice among {list(block_ids)} of {request_id!r}")
        num_blocks = self._slots.num_blocks
        if min(block_ids) < 0 or max(block_ids) >= num_blocks:
            raise LedgerError(
                f"blocks {list(block_ids)} of {request_id!r} are not all in a pool of {num_blocks}"
            )

    def _check_hits(self, request_id: str, row: int, first: int, blocks_M: Index) -> None:
        lease_M = self._tables.lease_NM[row, first : first + len(blocks_M)]
        wrong = np.flatnonzero((lease_M != NO_LEASE) & (block_of(lease_M) != blocks_M))
        if len(wrong):
            m = int(wrong[0])
            raise LedgerError(
                f"block {blocks_M[m]} of {request_id!r} is not block {block_of(lease_M)[m]}, whose"
                " rows it shares; assign shared blocks first and in their order"
            )

    def _check_assigned(self, step: StepRows, row_R: Index, live_R: npt.NDArray[np.bool_]) -> None:
        assigned_R = self._tables.assigned_N[row_R]
        stop_R = step.starts_R + step.counts_R
        bad = np.flatnonzero(live_R & (stop_R > assigned_R * self.block_size))
        if len(bad):
            r = int(bad[0])
            block = max(int(assigned_R[r]), int(step.starts_R[r]) // self.block_size)
            raise LedgerError(
                f"block {block} of {step.request_ids[r]!r} is not in its table of {assigned_R[r]}"
                " blocks; assign it when the step is planned"
            )

    def _check_owners(self) -> None:
        """Every block in a table is under its present lease, and written by one request at most."""
        writer: dict[int, str] = {}
        for request_id, row in self._tables.row_of.items():
            lease_M = self._tables.lease_NM[row]
            lost = np.flatnonzero((lease_M != NO_LEASE) & ~self._slots.holds(lease_M))
            if len(lost):
                block = int(block_of(lease_M)[lost[0]])
                raise IntegrityError(
                    f"KV block {block} of {request_id!r} was handed to somebody else"
                )
            for lease in lease_M[self._tables.hits_N[row] : self._tables.assigned_N[row]].tolist():
                if writer.setdefault(lease, request_id) is not request_id:
                    raise IntegrityError(
                        f"lease {lease:#x} belongs to {writer[lease]!r} and {request_id!r}"
                    )

    def _are_assigned(self, row_R: Index, positions_R: Index) -> bool:
        stop_R = self._tables.assigned_N[row_R] * self.block_size
        # No byte is False: dearer calls of numpy would make half of a decode step's cost.
        return b"\0" not in (positions_R < stop_R).tobytes()

    def _store_decodes(self, logged: LoggedSteps) -> bool:
        """Store decodes that all go to free slots of own blocks; False, with nothing written, for others."""
        tables, row_R, size = self._tables, logged.row_R, self.block_size
        if (logged.starts_R < tables.prompt_N[row_R]).any():
            return False
        segments = StepSegments.cut(logged.starts_R, logged.counts_R, size)
        row_S = row_R[segments.request_S]
        lease_S = tables.lease_NM[row_S, segments.block_S]
        if (segments.block_S < tables.hits_N[row_S]).any() or self._cache.awaits(lease_S):
            return False
        return self._slots.store_steps(
            segments.rows(block_of(lease_S) * size + segments.offset_S),
            np.repeat(lease_S, segments.length_S),
            segments.rows(segments.block_S * size + segments.offset_S),
            logged.steps,
            origin=Origin.DECODE,
            weight_version=logged.weight_version,
        )

    def _store(self, step: StepRows, row_R: Index, run_R: Index) -> None:
        def store_run(r: int, first: int, num_blocks: int, source: int) -> bool:
            return live_R[r] and self._store_run(step, int(row_R[r]), first, num_blocks, source)

        live_R = (row_R >= 0) & (run_R == self._tables.run_N[row_R])
        self._check_assigned(step, row_R, live_R)
        segments = StepSegments.of_rest(step.starts_R, step.counts_R, self.block_size, store_run)
        row_S, run_S = row_R[segments.request_S], run_R[segments.request_S]
        live_S = live_R[segments.request_S]
        if self._late:
            self._settle(step, row_R, run_R)
        lease_S, prompt_S = self._leases(step, segments, row_S, run_S, live_S)
        hit_S = live_S & (segments.block_S < self._tables.hits_N[row_S])
        for s in np.flatnonzero(hit_S).tolist():
            self._keep(step, segments.pick(np.array([s])), int(row_S[s]), int(prompt_S[s]))
        known_S = (lease_S != NO_LEASE) & ~hit_S
        if known_S.any():
            self._write(step, segments.pick(known_S), lease_S[known_S], prompt_S[known_S])

    def _store_run(
        self, step: StepRows, row: int, first: int, num_blocks: int, source: int
    ) -> bool:
        """Store whole blocks of one request in its current run, if no slot of them is written."""
        tables = self._tables
        if self._cache.waiting or first < tables.hits_N[row]:
            return False
        lease_M = tables.lease_NM[row, first : first + num_blocks]
        if not self._slots.blank(lease_M):
            return False
        self._slots.store_blocks(
            lease_M,
            first,
            step.ids_TLK,
            source,
            origin_CB=run_origins(first, num_blocks, int(tables.prompt_N[row]), self.block_size),
            weight_version=step.weight_version,
        )
        return True

    def _settle(self, step: StepRows, row_R: Index, run_R: Index) -> None:
        """Steps come in order: when one of a later run is stored, those of the earlier runs all were."""
        for r, request_id in enumerate(step.request_ids):
            owed = self._late.get(request_id)
            if owed is not None and row_R[r] != NOBODY:
                over = [c for (run, _), c in owed.chunk_of.items() if run < run_R[r]]
                self._late.forget_chunks(over)
                self._cache.settle(request_id, over)

    def _leases(
        self,
        step: StepRows,
        segments: StepSegments,
        row_S: Index,
        run_S: Index,
        live_S: npt.NDArray[np.bool_],
    ) -> tuple[Index, Index]:
        """Lease and prompt tokens of each segment; `NO_LEASE` if nobody wants its rows any more."""
        lease_S, prompt_S = np.full(len(row_S), NO_LEASE, np.int64), np.zeros(len(row_S), np.int64)
        where = row_S[live_S], segments.block_S[live_S]
        lease_S[live_S] = self._tables.lease_NM[where]
        prompt_S[live_S] = self._tables.prompt_N[where[0]]
        for s in np.flatnonzero(~live_S).tolist() if self._late else ():
            # The request is gone or in a later run.
            owed = self._late.get(step.request_ids[int(segments.request_S[s])])
            if owed is not None:
                run = owed.run if run_S[s] == NOBODY else int(run_S[s])
                lease_S[s] = owed.chunk_of.get((run, int(segments.block_S[s])), NO_LEASE)
                prompt_S[s] = owed.prompt_tokens
        return lease_S, prompt_S

    def _write(
        self, step: StepRows, segments: StepSegments, lease_S: Index, prompt_S: Index
    ) -> None:
        """Write to the slots whose lease has not ended, then tell the snapshots that wait."""
        size, ids_TLK = self.block_size, step.ids_TLK
        slots_T = segments.rows(block_of(lease_S) * size + segments.offset_S)
        if len(slots_T) != len(ids_TLK):
            ids_TLK = ids_TLK[segments.rows(segments.source_S)]
        self._slots.store_batch(
            slots_T,
            np.repeat(lease_S, segments.length_S),
            segments.rows(segments.block_S * size + segments.offset_S),
            ids_TLK,
            origin_T=segments.origins(prompt_S, size),
            weight_version=step.weight_version,
        )
        if self._cache.waiting:
            for s, lease in enumerate(lease_S.tolist()):
                if lease in self._cache.waiting:
                    one = segments.pick(np.array([s]))
                    self._cache.refresh_pending(lease, self._rows_of(step, one, int(prompt_S[s])))
                    if lease not in self._cache.waiting:
                        self._forget_late([lease])
        self._late.forget_chunks(lease_S[self._slots.complete(lease_S)] if self._late else [])

    def _rows_of(self, step: StepRows, segment: StepSegments, prompt_tokens: int) -> RowRange:
        source, length = int(segment.source_S[0]), int(segment.length_S[0])
        origin_T = np.zeros(length, np.uint8)
        origin_T[:] = segment.origins(np.array([prompt_tokens]), self.block_size)
        return RowRange(
            start=int(segment.block_S[0]) * self.block_size + int(segment.offset_S[0]),
            ids_TLK=step.ids_TLK[source : source + length],
            origin_T=origin_T,
            version_T=np.full(length, step.weight_version, np.uint32),
        )

    def _keep(self, step: StepRows, segment: StepSegments, row: int, prompt_tokens: int) -> None:
        """A run computes again what it took from the prefix cache: the slot is not its to write."""
        request_id = step.request_ids[int(segment.request_S[0])]
        rows = self._rows_of(step, segment, prompt_tokens)
        self._cache.keep(request_id, rows, int(self._tables.run_N[row]))

    def _read_slots(
        self, row: int, first: int, last: int
    ) -> tuple[RouteIds, npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """The rows of blocks `[first, last)` in the slots of the current run, its own and shared ones."""
        lease_M = self._tables.lease_NM[row, first:last]
        if missing := last - first - len(lease_M):
            lease_M = np.pad(lease_M, (0, missing), constant_values=NO_LEASE)
        ids_TLK, origin_T, version_T = self._slots.get(lease_M, first)
        num_hits = int(self._tables.hits_N[row]) - first
        if num_hits > 0:
            shared_T = origin_T[: num_hits * self.block_size]
            shared_T[shared_T != ABSENT] = Origin.PREFIX_CACHE
        return ids_TLK, origin_T, version_T

    def _lacking(self, row: int) -> list[tuple[int, int]]:
        """`(block, lease)` of the blocks of the current run that lack rows."""
        count = int(max(self._tables.assigned_N[row], self._tables.hits_N[row]))
        lease_M = self._tables.lease_NM[row, :count]
        lacking = np.flatnonzero(~self._slots.complete(lease_M) & (lease_M != NO_LEASE))
        return list(zip(lacking.tolist(), lease_M[lacking].tolist(), strict=True))

    def _capture(self, request_id: str, row: int) -> None:
        """Take the rows out of the slots, and note which blocks still owe some."""
        tables, run = self._tables, int(self._tables.run_N[row])
        pending: dict[int, PendingBlock] = {}
        for block, lease in self._lacking(row):
            own = block >= int(tables.hits_N[row])
            pending[lease] = PendingBlock(block, own=own, run=run)
        count = int(max(tables.assigned_N[row], tables.hits_N[row]))
        ids_TLK, origin_T, version_T = self._read_slots(row, 0, count)
        rows = RowRange(start=0, ids_TLK=ids_TLK, origin_T=origin_T, version_T=version_T)
        self._cache.capture(request_id, rows, run, pending)
        for lease, note in pending.items():
            if note.own and (lease in self._cache.waiting or self._is_named(lease)):
                self._expect_late(request_id, row, note.block, lease)

    def _expect_late(self, request_id: str, row: int, block: int, lease: int) -> None:
        tables = self._tables
        self._late.add(request_id, int(tables.prompt_N[row]), int(tables.run_N[row]), block, lease)

    def _forget_late(self, leases: Sequence[int]) -> None:
        """Nobody waits for these any more; a block that can still be shared keeps its claim."""
        self._late.forget_chunks([lease for lease in leases if not self._is_named(lease)])
