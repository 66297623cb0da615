"""Rows owned by requests, not by KV blocks.

A request keeps its rows in chunks of its own from `begin` to its end, so nothing is freed under it, and a step that
is stored after its request was preempted lands where it belongs. Who may write what::

    own chunk      written by its request alone, by one run; each position once
    shared chunk   taken from the prefix cache by reference; never written by the sharer

Most blocks of a request have one chunk. One that a later run computes, or takes, again has several, each with the
rows of one run: `block_layers.py`. The chunk of the current run made the KV block which exists now, so it is what
`publish` shows; which of them the request itself reads is the choice of the ledger (`recompute.py`).

A shared chunk may still be filling: the block was published when the step that completes it was scheduled. That
is no race. A published chunk holds rows of one run of one request, that run computes each position once, and the
sharer only reads, so a position is absent until its one write and never changes after it.

Legend of shape suffixes: R = requests of a step, S = segments of a step, T = rows, C = chunks, N = table rows,
M = blocks.
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
from routebook.ledger.chunk_table import LAYERED, NONE, ChunkTable, Table
from routebook.ledger.layered_blocks import Dropped, LayeredBlocks
from routebook.ledger.recompute import check_recompute, recompute_option
from routebook.ledger.row_pool import RowPool
from routebook.ledger.spans import Index
from routebook.ledger.step_ledger import StepLedger
from routebook.ledger.step_log import LoggedSteps
from routebook.ledger.step_segments import StepSegments, run_origins
from routebook.routes.provenance import ABSENT, Origin
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
    recompute: str = recompute_option()

    def __post_init__(self) -> None:
        check_at_least("initial_rows", self.initial_rows, 1)
        check_at_least("growth_factor", self.growth_factor, 1.1)
        check_recompute(self.recompute)


class RequestLedger(StepLedger):
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
        config = config or LedgerConfig()
        self._table = ChunkTable()
        super().__init__(schema, block_size, self._table, config.recompute)
        self._pool = RowPool(
            schema,
            block_size,
            initial_chunks=-(-config.initial_rows // block_size),
            growth_factor=config.growth_factor,
        )
        self._layered = LayeredBlocks(self._table, self._pool, config.recompute)

    def share(self, request_id: str, block_hashes: Sequence[bytes]) -> None:
        """Take leading blocks from the prefix cache; see :meth:`Ledger.share`."""
        row, table, count = self._table.row(request_id), self._table, len(block_hashes)
        table.reach(count)
        table.hit_blocks_N[row] = count
        found_C = np.array([self._published.get(h, NONE) for h in block_hashes], np.int64)
        own_C, _, shared_C, shared_run_C = table.view(row, 0, count)
        empty_C = (own_C & shared_C) == NONE
        take_C = empty_C & (found_C >= 0)
        if take_C.any():
            shared_C[take_C] = found_C[take_C]
            shared_run_C[take_C] = table.run_N[row]
            table.sharers.add(row)
            self._pool.retain(found_C[take_C])
        for block in np.flatnonzero(~empty_C & (found_C >= 0)).tolist():
            self._layered.take_hit(row, block, int(table.run_N[row]), int(found_C[block]))

    def assign(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Nothing to do: rows do not depend on KV blocks; see :meth:`Ledger.assign`."""
        self._table.row(request_id)

    def publish(self, request_id: str, block_index: int, block_hash: bytes) -> None:
        """Name the rows of a full block; see :meth:`Ledger.publish`."""
        row, table = self._table.row(request_id), self._table
        if block_index < 0:
            raise LedgerError(f"block_index={block_index} of {request_id!r} is negative")
        table.reach(block_index + 1)
        if block_hash in self._published:
            self._drop(request_id, row, self._layered.decline(row, block_index))
            return
        if block_index < table.hit_blocks_N[row]:
            raise LedgerError(
                f"block {block_index} of {request_id!r} came from the prefix cache; only the request"
                " that computes a block publishes it"
            )
        chunk = self._chunk_of_run(row, block_index)
        # Rows declined when another's hash stood in the way are gone: then nothing is published.
        if chunk != NONE:
            self._published[block_hash] = chunk
            self._pool.retain_one(chunk)

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

    def read(self, request_id: str, start: int, stop: int) -> RowRange:
        """Copy rows of a living request; see :meth:`Ledger.read`."""
        row, table, size = self._table.row(request_id), self._table, self.block_size
        if not 0 <= start <= stop:
            raise LedgerError(f"rows [{start}, {stop}) of {request_id!r} are not a range")
        self._write_out()
        first, last = start // size, -(-stop // size)
        own_C = table.own_NM[row, first:last]
        if missing := last - first - len(own_C):
            own_C = np.pad(own_C, (0, missing), constant_values=NONE)
        if row in table.sharers and (table.shared_NM[row, first:last] != NONE).any():
            ids_TLK, origin_T, version_T = self._read_shared(row, first, own_C)
        else:
            ids_TLK, origin_T, version_T = self._pool.read(own_C)
        part = slice(start - first * size, stop - first * size)
        rows = RowRange(
            start=start, ids_TLK=ids_TLK[part], origin_T=origin_T[part], version_T=version_T[part]
        )
        rows.clear_absent(self.schema.absent)
        return rows

    def release(self, request_id: str, reason: ReleaseReason) -> None:
        """Let a request wait or go; see :meth:`Ledger.release`."""
        row, table = self._table.row(request_id), self._table
        self._close_batch()
        if reason is ReleaseReason.PREEMPTED:
            self._drop(request_id, row, self._layered.prune(row))
            table.start_run(row)
            return
        own_M, home_M, shared_M, _ = table.view(row, 0, table.num_blocks)
        blocks = np.flatnonzero(own_M >= 0)
        for block in blocks[self._pool.refs_C[own_M[blocks]] > 1].tolist():
            self._expect_late(request_id, row, block, int(own_M[block]), int(home_M[block]))
        shared_M = shared_M[(shared_M >= 0) & (shared_M != LAYERED)]
        held_C = np.concatenate([own_M[blocks], shared_M]).astype(np.int64)
        for block, layers in table.layers.get(row, {}).items():
            self._drop(request_id, row, [(block, layer) for layer in layers.layers])
        table.end(request_id)
        self._give_up(held_C)

    def reset(self) -> None:
        """Withdraw everything published; see :meth:`Ledger.reset`."""
        self.withdraw(list(self._published))

    def usage(self) -> LedgerUsage:
        """Count what is held; see :meth:`Ledger.usage`."""
        self._write_out()
        return LedgerUsage(
            requests=len(self._table),
            request_chunks=len(self._table.held()),
            published=len(self._published),
            capacity_nbytes=self._pool.nbytes,
        )

    def check_integrity(self) -> None:
        """Recount every reference; see :meth:`Ledger.check_integrity`."""
        self._write_out()
        table, pool = self._table, self._pool
        table.check()
        held = [*table.held(), *self._published.values()]
        refs_C = np.bincount(np.array(held, np.int64), minlength=pool.num_chunks)
        if len(refs_C) > pool.num_chunks:
            raise IntegrityError(f"chunk {len(refs_C) - 1} is held and does not exist")
        pool.check(refs_C)
        for chunk in self._late:
            if not refs_C[chunk]:
                raise IntegrityError(f"chunk {chunk} waits for rows and belongs to nobody")

    def _are_assigned(self, row_R: Index, positions_R: Index) -> bool:
        """Chunks are made when they are needed."""
        return True

    def _store_decodes(self, logged: LoggedSteps) -> bool:
        """Store decodes that all go to free rows of own chunks; False, with nothing written, for others."""
        table, row_R = self._table, logged.row_R
        if (logged.starts_R < table.prompt_N[row_R]).any():
            return False
        segments = StepSegments.cut(logged.starts_R, logged.counts_R, self.block_size)
        row_S, run_S = row_R[segments.request_S], logged.run_R[segments.request_S]
        own_S, plain_S = self._own_chunks(row_S, segments.block_S, run_S)
        if not plain_S.all():
            return False
        first_S = own_S.astype(np.int64) * self.block_size + segments.offset_S
        rows_T = segments.rows(first_S)
        if self._pool.present(rows_T).any():
            return False
        rows_RN = rows_T.reshape(len(row_R), -1)
        self._pool.write_steps(rows_RN, logged.steps, Origin.DECODE, logged.weight_version)
        return True

    def _store(self, step: StepRows, row_R: Index, run_R: Index) -> None:
        def store_run(r: int, first: int, num_blocks: int, source: int) -> bool:
            place = int(row_R[r]), int(run_R[r])
            return self._store_run(step, place, first, num_blocks, source)

        table = self._table
        segments = StepSegments.of_rest(step.starts_R, step.counts_R, self.block_size, store_run)
        if self._late:
            self._store_late(step, segments, run_R)
        if len(segments) and row_R.min() < 0:
            segments = segments.pick(row_R[segments.request_S] >= 0)
        if not len(segments):
            return
        row_S, run_S = row_R[segments.request_S], run_R[segments.request_S]
        own_S, plain_S = self._own_chunks(row_S, segments.block_S, run_S)
        if plain_S.all():
            self._write(step, segments, own_S, table.prompt_N[row_S])
            return
        # Blocks with a chunk of another run, or a shared one.
        for s in np.flatnonzero(~plain_S).tolist():
            place = int(row_S[s]), int(segments.block_S[s]), int(run_S[s])
            own_S[s] = self._layered.chunk_of_run(*place)
        kept_S = own_S >= 0
        self._write(step, segments.pick(kept_S), own_S[kept_S], table.prompt_N[row_S[kept_S]])

    def _store_run(
        self, step: StepRows, place: tuple[int, int], first: int, num_blocks: int, source: int
    ) -> bool:
        """Store whole blocks of one request, if all have empty own chunks of this run, or nothing at all."""
        (row, run), table, pool = place, self._table, self._pool
        if row < 0:
            return False
        table.reach(first + num_blocks)
        own_M, home_M, _, _ = chunks = table.view(row, first, first + num_blocks)
        if chunks.max() < 0:
            own_M[:] = pool.allocate(num_blocks, self._chunk_before(row, first))
            home_M[:] = run
        elif (home_M != run).any() or not pool.blank(own_M):
            return False
        origin = run_origins(first, num_blocks, int(table.prompt_N[row]), self.block_size)
        pool.write_blocks(own_M, step.ids_TLK, source, origin, step.weight_version)
        return True

    def _chunk_of_run(self, row: int, block: int) -> int:
        """The chunk that gets, or would get, every row that the current run computes for a block."""
        table, run = self._table, int(self._table.run_N[row])
        own, home, shared, _ = table.view(row, block, block + 1)[:, 0].tolist()
        if own >= 0 and home == run:
            return int(own)
        if own >= 0 or shared >= 0:
            return self._layered.chunk_of_run(row, block, run)
        chunk = self._pool.allocate_one(self._chunk_before(row, block))
        table.own_NM[row, block], table.home_NM[row, block] = chunk, run
        return chunk

    def _chunk_before(self, row: int, block: int) -> int:
        """The chunk behind which that of a block should lie; of a layered block it does not matter which."""
        before = row, max(block - 1, 0)
        return max(int(self._table.own_NM[before]), int(self._table.shared_NM[before]))

    def _own_chunks(
        self, row_S: Index, block_S: Index, run_S: Index
    ) -> tuple[Table, npt.NDArray[np.bool_]]:
        """The own chunk of each segment, allocated where there is none, and which are of its run and nothing else."""
        table = self._table
        table.reach(int(block_S.max()) + 1)
        own_S, home_S, shared_S, _ = table.take(row_S, block_S)
        # Both are NONE, which has every bit.
        empty_S = (own_S & shared_S) == NONE
        if empty_S.any():
            row_S, block_S = row_S[empty_S], block_S[empty_S]
            own_S[empty_S] = self._allocate(row_S, block_S)
            home_S[empty_S] = table.home_NM[row_S, block_S] = run_S[empty_S]
        return own_S, home_S == run_S

    def _allocate(self, row_S: Index, block_S: Index) -> Index:
        """Own chunks for blocks that have none, each request's side by side as far as possible."""
        own_NM, shared_NM = self._table.own_NM, self._table.shared_NM
        first_S = np.concatenate([[0], np.flatnonzero(row_S[1:] != row_S[:-1]) + 1])
        counts = np.diff(first_S, append=len(row_S)).tolist()
        before = row_S[first_S], np.maximum(block_S[first_S] - 1, 0)
        after = np.maximum(own_NM[before], shared_NM[before]).tolist()
        chunks_S = own_NM[row_S, block_S] = self._pool.allocate_each(counts, after)
        return chunks_S

    def _write(
        self,
        step: StepRows,
        segments: StepSegments,
        chunk_S: npt.NDArray[np.integer],
        prompt_S: Index,
    ) -> None:
        """Write segments into one chunk each; a row that is present stays."""
        first_S = chunk_S.astype(np.int64) * self.block_size + segments.offset_S
        rows_T = segments.rows(first_S)
        open_T = ~self._pool.present(rows_T)
        if not open_T.any():
            return
        ids_TLK: RouteIds = step.ids_TLK
        origin = segments.origins(prompt_S, self.block_size)
        if len(rows_T) != len(ids_TLK) or not open_T.all():
            ids_TLK = ids_TLK[segments.rows(segments.source_S)[open_T]]
            rows_T = rows_T[open_T]
            origin = origin if isinstance(origin, int) else origin[open_T]
        self._pool.write(rows_T, ids_TLK, origin, step.weight_version)

    def _drop(self, request_id: str, row: int, dropped: Dropped) -> None:
        """Give up layers; one that others hold still gets what its run owes it."""
        for block, layer in dropped:
            if not layer.shared and self._pool.refs_C[layer.chunk] > 1:
                self._expect_late(request_id, row, block, layer.chunk, layer.run)
            self._give_up(np.array([layer.chunk]))

    def _expect_late(self, request_id: str, row: int, block: int, chunk: int, run: int) -> None:
        if not self._pool.complete(np.array([chunk]))[0]:
            self._late.add(request_id, int(self._table.prompt_N[row]), run, block, chunk)

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

    def _read_shared(
        self, row: int, first: int, own_C: Table
    ) -> tuple[RouteIds, npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """Blocks from `first` on of a request that has shared chunks, or layers."""
        size, count = self.block_size, len(own_C)
        chunks_C, origin_C = own_C.copy(), np.zeros(count, np.uint8)
        shared_C = self._table.shared_NM[row, first : first + count]
        simple = np.flatnonzero((shared_C >= 0) & (shared_C != LAYERED))
        chunks_C[simple], origin_C[simple] = shared_C[simple], Origin.PREFIX_CACHE
        layered = (first + np.flatnonzero(shared_C == LAYERED)).tolist()
        whole = self._layered.whole(row, layered)
        for block, (chunk, origin) in whole.items():
            chunks_C[block - first], origin_C[block - first] = chunk, origin
        ids_TLK, origin_T, version_T = self._pool.read(chunks_C)
        told_T = np.repeat(origin_C, size)
        np.copyto(origin_T, told_T, where=(told_T != 0) & (origin_T != ABSENT))
        for block in layered:
            if block not in whole:
                part = slice((block - first) * size, (block - first + 1) * size)
                ids_TLK[part], origin_T[part], version_T[part] = self._layered.read(row, block)
        return ids_TLK, origin_T, version_T
