"""Rows owned by requests, not by KV blocks.

A request keeps its rows in chunks of its own from `begin` to its end, so nothing is freed under it, and a step that
is stored after its request was preempted lands where it belongs. Who may write what::

    own chunk      written by its request alone; each position once, by the first run that computes it
    shared chunk   taken from the prefix cache by reference; never written by the sharer
    redo chunk     rows that a later run computes for a block whose own or shared rows are older: they made the
                   KV block which exists now, so they are what `publish` shows; the request itself does not read them

A shared chunk may still be filling: the block was published when the step that completes it was scheduled. That
is no race. A published chunk holds rows of one run of one request, that run computes each position once, and the
sharer only reads, so a position is absent until its one write and never changes after it.

Legend of shape suffixes: R = requests of a step, S = segments of a step, T = rows, C = chunks, N = table rows,
M = blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt

from routebook.config import check_at_least, option
from routebook.errors import IntegrityError, LedgerError
from routebook.ledger.base import (
    Ledger,
    LedgerUsage,
    ReleaseReason,
    RouteIds,
    RowRange,
    StepRows,
)
from routebook.ledger.chunk_table import DECLINED, MIXED, NONE, ChunkTable, Table
from routebook.ledger.late_chunks import LateChunks
from routebook.ledger.row_pool import RowPool
from routebook.ledger.spans import Index
from routebook.ledger.step_segments import StepSegments
from routebook.routes.provenance import Origin
from routebook.routes.schema import RouteSchema


@dataclass(frozen=True, kw_only=True)
class LedgerConfig:
    """Options of :class:`RequestLedger`."""

    initial_rows: int = option(
        "rows the ledger has room for at the start (65536 by default); it grows when they are used",
        default=65536,
    )
    growth_factor: float = option(
        "capacity after a growth over the capacity before (2 by default, at least 1.1)",
        default=2.0,
    )

    def __post_init__(self) -> None:
        check_at_least("initial_rows", self.initial_rows, 1)
        check_at_least("growth_factor", self.growth_factor, 1.1)


class RequestLedger(Ledger):
    """A ledger whose rows belong to requests; see the head of this file.

    Args:
        schema: layers, top-k and dtype of a row.
        block_size: tokens per KV block, at least 1; also the rows per chunk.
        config: options, the defaults if None.

    Raises:
        ConfigError: `block_size` is below 1.
    """

    def __init__(
        self, schema: RouteSchema, block_size: int, config: LedgerConfig | None = None
    ) -> None:
        check_at_least("block_size", block_size, 1)
        config = config or LedgerConfig()
        self.schema = schema
        self.block_size = block_size
        self._pool = RowPool(
            schema,
            block_size,
            initial_chunks=-(-config.initial_rows // block_size),
            growth_factor=config.growth_factor,
        )
        self._table = ChunkTable()
        self._row_of: dict[str, int] = {}
        self._published: dict[bytes, int] = {}
        self._late = LateChunks()

    def begin(self, request_id: str, num_prompt_tokens: int) -> None:
        """Start a request; see :meth:`Ledger.begin`."""
        if request_id in self._row_of:
            raise LedgerError(f"request {request_id!r} lives already; release it first")
        if num_prompt_tokens < 0:
            raise LedgerError(
                f"num_prompt_tokens={num_prompt_tokens} of {request_id!r} is negative"
            )
        # The id names another request now; a row of the old one must not pass for the new one's block.
        self._late.forget_request(request_id)
        self._row_of[request_id] = self._table.add(num_prompt_tokens)

    def share(self, request_id: str, block_hashes: Sequence[bytes]) -> None:
        """Take leading blocks from the prefix cache; see :meth:`Ledger.share`."""
        row, table, count = self._row(request_id), self._table, len(block_hashes)
        table.reach(count)
        table.hit_blocks_N[row] = count
        found_C = np.array([self._published.get(h, NONE) for h in block_hashes], np.int64)
        own_C, shared_C = table.own_NM[row, :count], table.shared_NM[row, :count]
        take_C = (found_C >= 0) & (shared_C < 0) & (found_C != own_C)
        held = np.flatnonzero(own_C >= 0)
        take_C[held] &= ~self._pool.complete(own_C[held])
        shared_C[take_C] = found_C[take_C]
        table.shared_run_NM[row, :count][take_C] = table.run_N[row]
        self._pool.retain(found_C[take_C])

    def assign(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Nothing to do: rows do not depend on KV blocks; see :meth:`Ledger.assign`."""
        self._row(request_id)

    def publish(self, request_id: str, block_index: int, block_hash: bytes) -> None:
        """Name the rows of a full block; see :meth:`Ledger.publish`."""
        row, table = self._row(request_id), self._table
        if block_index < 0:
            raise LedgerError(f"block_index={block_index} of {request_id!r} is negative")
        table.reach(block_index + 1)
        if block_hash in self._published:
            self._drop_redo(request_id, row, block_index)
            table.redo_NM[row, block_index] = DECLINED
            return
        if block_index < table.hit_blocks_N[row]:
            raise LedgerError(
                f"block {block_index} of {request_id!r} came from the prefix cache; only the request"
                " that computes a block publishes it"
            )
        chunk = self._chunk_of_run(row, block_index)
        # Rows declined when another's hash stood in the way are gone: then nothing is published.
        if chunk != DECLINED:
            self._published[block_hash] = chunk
            self._pool.retain(np.array([chunk]))

    def withdraw(self, block_hashes: Sequence[bytes]) -> None:
        """Forget evicted blocks; see :meth:`Ledger.withdraw`."""
        chunks = [self._published.pop(h) for h in block_hashes if h in self._published]
        self._give_up(np.array(chunks, np.int64))

    def available(self, block_hashes: Sequence[bytes]) -> int:
        """Count leading published hashes; see :meth:`Ledger.available`."""
        for count, block_hash in enumerate(block_hashes):
            if block_hash not in self._published:
                return count
        return len(block_hashes)

    def store_batch(self, step: StepRows) -> None:
        """Write a step at once; see :meth:`Ledger.store_batch`."""
        step.check(self.schema)
        table, row_of = self._table, self._row_of
        row_R = np.array(list(map(row_of.get, step.request_ids, repeat(NONE))), np.int64)
        if self._store_decodes(step, row_R):
            return
        table.next_N[row_R[row_R >= 0]] = NONE
        run_R = self._runs(step, row_R)
        segments = StepSegments.cut(step.starts_R, step.counts_R, self.block_size)
        if self._late:
            self._store_late(step, segments, run_R)
        if (row_R < 0).any():
            segments = segments.pick(row_R[segments.request_S] >= 0)
        if not len(segments):
            return
        table.reach(int(segments.block_S.max()) + 1)
        row_S, run_S = row_R[segments.request_S], run_R[segments.request_S]
        self._allocate_own(row_S, segments.block_S, run_S)
        where = (row_S, segments.block_S)
        plain_S = (table.home_NM[where] == run_S) & (table.shared_NM[where] < 0)
        if plain_S.all():
            self._write(step, segments, table.own_NM[where], table.prompt_N[row_S])
            return
        plain = segments.pick(plain_S)
        own_S = table.own_NM[where][plain_S]
        self._write(step, plain, own_S, table.prompt_N[row_S[plain_S]])
        self._store_contested(step, segments.pick(~plain_S), row_S[~plain_S], run_S[~plain_S])

    def read(self, request_id: str, start: int, stop: int) -> RowRange:
        """Copy rows of a living request; see :meth:`Ledger.read`."""
        row, table, size = self._row(request_id), self._table, self.block_size
        if not 0 <= start <= stop:
            raise LedgerError(f"rows [{start}, {stop}) of {request_id!r} are not a range")
        first, last = start // size, -(-stop // size)
        own_C = np.full(last - first, NONE, np.int64)
        shared_C = own_C.copy()
        known = table.own_NM[row, first:last]
        own_C[: len(known)] = known
        shared_C[: len(known)] = table.shared_NM[row, first:last]
        ids_TLK, origin_T, version_T = self._pool.read(np.where(own_C >= 0, own_C, shared_C))
        borrowed_T = np.repeat(own_C < 0, size)
        if borrowed_T.any():
            origin_T[borrowed_T & (origin_T != Origin.ABSENT)] = Origin.PREFIX_CACHE
        both = np.flatnonzero((own_C >= 0) & (shared_C >= 0))
        if len(both):
            self._fill_from_shared(both, shared_C[both], ids_TLK, origin_T, version_T)
        absent_T = origin_T == Origin.ABSENT
        if absent_T.any():
            ids_TLK[absent_T] = self.schema.absent
            version_T[absent_T] = 0
        rows = slice(start - first * size, stop - first * size)
        return RowRange(
            start=start, ids_TLK=ids_TLK[rows], origin_T=origin_T[rows], version_T=version_T[rows]
        )

    def release(self, request_id: str, reason: ReleaseReason) -> None:
        """Let a request wait or go; see :meth:`Ledger.release`."""
        row, table = self._row(request_id), self._table
        for block in np.flatnonzero(table.redo_NM[row] != NONE).tolist():
            self._drop_redo(request_id, row, block)
        if reason is ReleaseReason.PREEMPTED:
            table.next_N[row] = NONE
            table.run_N[row] += 1
            table.hit_blocks_N[row] = 0
            return
        own_M, shared_M = table.own_NM[row], table.shared_NM[row]
        blocks = np.flatnonzero(own_M >= 0)
        for block in blocks[self._pool.refs_C[own_M[blocks]] > 1].tolist():
            self._expect_late(request_id, row, block, int(own_M[block]), table.home_NM[row, block])
        held_C = np.concatenate([own_M[blocks], shared_M[shared_M >= 0]]).astype(np.int64)
        table.remove(row)
        del self._row_of[request_id]
        self._give_up(held_C)

    def reset(self) -> None:
        """Withdraw everything published; see :meth:`Ledger.reset`."""
        self.withdraw(list(self._published))

    def usage(self) -> LedgerUsage:
        """Count what is held; see :meth:`Ledger.usage`."""
        tables = (self._table.own_NM, self._table.shared_NM, self._table.redo_NM)
        return LedgerUsage(
            requests=len(self._row_of),
            request_chunks=sum(int((table >= 0).sum()) for table in tables),
            published=len(self._published),
            capacity_nbytes=self._pool.nbytes,
        )

    def check_integrity(self) -> None:
        """Recount every reference; see :meth:`Ledger.check_integrity`."""
        table, pool = self._table, self._pool
        rows = [*self._row_of.values(), *table.unused]
        if sorted(rows) != list(range(len(table.prompt_N))):
            raise IntegrityError(f"table rows {sorted(rows)} are not each used once")
        tables = (table.own_NM, table.shared_NM, table.redo_NM)
        for unused in table.unused:
            if any((chunks[unused] != NONE).any() for chunks in tables):
                raise IntegrityError(f"table row {unused} belongs to no request and holds chunks")
        held = [chunks[chunks >= 0] for chunks in tables]
        held.append(np.array(list(self._published.values()), np.int32))
        refs_C = np.bincount(np.concatenate(held), minlength=pool.num_chunks)
        if len(refs_C) > pool.num_chunks:
            raise IntegrityError(f"chunk {len(refs_C) - 1} is held and does not exist")
        pool.check(refs_C)
        for chunk in self._late:
            if not refs_C[chunk]:
                raise IntegrityError(f"chunk {chunk} waits for rows and belongs to nobody")

    def _row(self, request_id: str) -> int:
        row = self._row_of.get(request_id)
        if row is None:
            raise LedgerError(f"no living request {request_id!r}; begin it first")
        return row

    def _store_decodes(self, step: StepRows, row_R: Index) -> bool:
        """Store the step that most steps are: one row each, next to the last one in an own chunk.

        Returns False, with nothing written, for any other step. Whatever else touches a request clears its
        `next_N`; a step of decodes that finds its chunks untouched sets it, see :meth:`_find_next`.
        """
        table = self._table
        if not len(row_R) or len(step.ids_TLK) != len(row_R) or step.counts_R.max() != 1:
            return False
        if row_R.min() < 0 or self._late.involves(step.request_ids):
            return False
        if step.runs_R is not None and (step.runs_R != table.run_N[row_R]).any():
            return False
        if not (table.next_N[row_R] == step.starts_R).all() and not self._find_next(step, row_R):
            return False
        rows_R = table.next_row_N[row_R]
        self._pool.scatter(rows_R, step.ids_TLK, int(Origin.DECODE), step.weight_version)
        rows_R += 1
        table.next_row_N[row_R] = rows_R
        # At the end of its chunk a request has no next row there.
        table.next_N[row_R] = np.where(rows_R % self.block_size, step.starts_R + 1, NONE)
        return True

    def _find_next(self, step: StepRows, row_R: Index) -> bool:
        """Point `next_N` to the rows of a step of decodes; False if one is not plainly free for it."""
        table = self._table
        block_R, offset_R = np.divmod(step.starts_R, self.block_size)
        if int(block_R.max()) >= table.own_NM.shape[1]:
            return False
        where = (row_R, block_R)
        own_R = table.own_NM[where]
        foreign_R = (own_R < 0) | (table.home_NM[where] != table.run_N[row_R])
        if (foreign_R | (table.shared_NM[where] >= 0)).any():
            return False
        rows_R = own_R.astype(np.int64) * self.block_size + offset_R
        if self._pool.present(rows_R).any() or (step.starts_R < table.prompt_N[row_R]).any():
            return False
        table.next_N[row_R], table.next_row_N[row_R] = step.starts_R, rows_R
        return True

    def _runs(self, step: StepRows, row_R: Index) -> Index:
        # A request that is gone has no current run; `_store_late` knows its last one.
        current_R = np.where(row_R >= 0, self._table.run_N[row_R], NONE)
        if step.runs_R is None:
            return current_R
        ahead = np.flatnonzero((row_R >= 0) & (step.runs_R > current_R))
        if len(ahead):
            which = int(ahead[0])
            raise LedgerError(
                f"run {step.runs_R[which]} of {step.request_ids[which]!r} has not begun; it was"
                f" preempted {current_R[which]} times"
            )
        return step.runs_R

    def _chunk_of_run(self, row: int, block: int) -> int:
        """The chunk that gets, or would get, every row that the current run computes for a block."""
        table, run = self._table, self._table.run_N[row]
        if table.own_NM[row, block] >= 0 and table.home_NM[row, block] == run:
            return int(table.own_NM[row, block])
        where = np.array([row]), np.array([block])
        self._allocate_own(*where, np.array([run]))
        if table.home_NM[row, block] == run:
            return int(table.own_NM[row, block])
        self._allocate(table.redo_NM, *where)
        return int(table.redo_NM[row, block])

    def _allocate_own(self, row_S: Index, block_S: Index, run_S: Index) -> None:
        table = self._table
        empty_S = (table.own_NM[row_S, block_S] == NONE) & (table.shared_NM[row_S, block_S] == NONE)
        if empty_S.any():
            row_S, block_S = row_S[empty_S], block_S[empty_S]
            self._allocate(table.own_NM, row_S, block_S)
            table.home_NM[row_S, block_S] = run_S[empty_S]

    def _allocate(self, chunks_NM: Table, row_S: Index, block_S: Index) -> None:
        """Fill the places of a table that have no chunk, each request's side by side as far as possible."""
        empty_S = chunks_NM[row_S, block_S] == NONE
        row_S, block_S = row_S[empty_S], block_S[empty_S]
        if not len(row_S):
            return
        first_S = np.concatenate([[0], np.flatnonzero(np.diff(row_S)) + 1])
        counts = np.diff(first_S, append=len(row_S)).tolist()
        before = row_S[first_S], np.maximum(block_S[first_S] - 1, 0)
        after = np.maximum(chunks_NM[before], self._table.shared_NM[before]).tolist()
        chunks_NM[row_S, block_S] = self._pool.allocate_each(counts, after)

    def _write(
        self,
        step: StepRows,
        segments: StepSegments,
        chunk_S: npt.NDArray[np.integer],
        prompt_S: Index,
    ) -> None:
        """Write segments into one chunk each; a row that is present stays."""
        size = self.block_size
        rows_T = segments.rows(chunk_S.astype(np.int64) * size + segments.offset_S)
        self._write_where(step, segments, rows_T, prompt_S, ~self._pool.present(rows_T))

    def _write_where(
        self,
        step: StepRows,
        segments: StepSegments,
        rows_T: Index,
        prompt_S: Index,
        open_T: npt.NDArray[np.bool_],
    ) -> None:
        if not open_T.any():
            return
        ids_TLK: RouteIds = step.ids_TLK
        origin = segments.origins(prompt_S, self.block_size)
        if len(rows_T) == len(ids_TLK) and open_T.all():
            self._pool.write(rows_T, ids_TLK, origin, step.weight_version)
            return
        if not isinstance(origin, int):
            origin = origin[open_T]
        source_T = segments.rows(segments.source_S)[open_T]
        self._pool.write(rows_T[open_T], ids_TLK[source_T], origin, step.weight_version)

    def _store_contested(
        self, step: StepRows, segments: StepSegments, row_S: Index, run_S: Index
    ) -> None:
        """Store rows of blocks that have own rows of another run, or shared rows."""
        table = self._table
        where = (row_S, segments.block_S)
        # A block that this run took from the prefix cache was not made by it, whatever it computes there again.
        redo_S = (run_S == table.run_N[row_S]) & (segments.block_S >= table.hit_blocks_N[row_S])
        redo_S &= (table.home_NM[where] != run_S) & (table.redo_NM[where] != DECLINED)
        if redo_S.any():
            again, rows = segments.pick(redo_S), row_S[redo_S]
            self._allocate(table.redo_NM, rows, again.block_S)
            chunk_S = table.redo_NM[rows, again.block_S]
            self._write(step, again, chunk_S, table.prompt_N[rows])
        earlier_S = np.where(run_S >= table.shared_run_NM[where], table.shared_NM[where], NONE)
        open_T = ~self._present(segments, table.own_NM[where])
        open_T &= ~self._present(segments, earlier_S)
        which_T = np.repeat(np.arange(len(segments)), segments.length_S)
        for s in np.unique(which_T[open_T]).tolist():
            self._make_writable(
                step.request_ids[int(segments.request_S[s])],
                int(row_S[s]),
                int(segments.block_S[s]),
                int(run_S[s]),
            )
        first_S = table.own_NM[where].astype(np.int64) * self.block_size + segments.offset_S
        rows_T = segments.rows(first_S)
        self._write_where(step, segments, rows_T, table.prompt_N[row_S], open_T)

    def _present(
        self, segments: StepSegments, chunk_S: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.bool_]:
        first_S = np.maximum(chunk_S, 0).astype(np.int64) * self.block_size + segments.offset_S
        present_T = self._pool.present(segments.rows(first_S))
        return present_T & np.repeat(chunk_S >= 0, segments.length_S)

    def _make_writable(self, request_id: str, row: int, block: int, run: int) -> None:
        """Have an own chunk that may take a row of `run`; copy it first if others hold it."""
        table, pool = self._table, self._pool
        own, home = int(table.own_NM[row, block]), int(table.home_NM[row, block])
        if home == run:
            return
        if own >= 0 and pool.refs_C[own] == 1:
            table.home_NM[row, block] = MIXED
            return
        private = int(pool.allocate(1)[0])
        table.own_NM[row, block], table.home_NM[row, block] = private, MIXED
        if own < 0:
            return
        # What others hold must stay the rows of one run, and the rest of that run must still reach it.
        pool.copy_chunk(own, private)
        self._expect_late(request_id, row, block, own, home)
        self._give_up(np.array([own]))

    def _drop_redo(self, request_id: str, row: int, block: int) -> None:
        chunk = int(self._table.redo_NM[row, block])
        self._table.redo_NM[row, block] = NONE
        if chunk >= 0:
            if self._pool.refs_C[chunk] > 1:
                self._expect_late(request_id, row, block, chunk, int(self._table.run_N[row]))
            self._give_up(np.array([chunk]))

    def _expect_late(self, request_id: str, row: int, block: int, chunk: int, run: int) -> None:
        if run != MIXED and not self._pool.complete(np.array([chunk]))[0]:
            self._late.add(request_id, int(self._table.prompt_N[row]), int(run), block, chunk)

    def _give_up(self, chunks_C: Index) -> None:
        self._late.forget_chunks(self._pool.release(chunks_C))

    def _store_late(self, step: StepRows, segments: StepSegments, run_R: Index) -> None:
        """Complete published blocks whose request is gone or in a later run."""
        for s, r in enumerate(segments.request_S.tolist()):
            late = self._late.get(step.request_ids[r])
            if late is None:
                continue
            run = late.run if run_R[r] == NONE else int(run_R[r])
            chunk = late.chunk_of.get((run, int(segments.block_S[s])))
            if chunk is not None:
                chunks, prompt = np.array([chunk]), np.array([late.prompt_tokens])
                self._write(step, segments.pick(np.array([s])), chunks, prompt)
                self._late.forget_chunks(chunks[self._pool.complete(chunks)])

    def _fill_from_shared(
        self,
        blocks: Index,
        shared_C: Index,
        ids_TLK: RouteIds,
        origin_T: npt.NDArray[np.uint8],
        version_T: npt.NDArray[np.uint32],
    ) -> None:
        """Fill what the own chunks of `blocks` (counted from the first block read) lack."""
        size = self.block_size
        rows_T = (blocks[:, None] * size + np.arange(size)).ravel()
        shared_ids_TLK, shared_origin_T, shared_version_T = self._pool.read(shared_C)
        fill_T = (origin_T[rows_T] == Origin.ABSENT) & (shared_origin_T != Origin.ABSENT)
        rows_T = rows_T[fill_T]
        ids_TLK[rows_T] = shared_ids_TLK[fill_T]
        origin_T[rows_T] = Origin.PREFIX_CACHE
        version_T[rows_T] = shared_version_T[fill_T]
