"""Rows of requests whose KV blocks went, and the notes about rows that were on the way when they went.

With steps in flight no single look at the slots is enough: when a request is preempted, the rows of the steps before
are not stored yet, and when they are, its blocks may have another owner. So the snapshot is taken before the blocks
are freed, with a note for each block that lacked rows, and completed as the notes come true::

    preempted   capture           what the slots have, and which leases still owe rows
    stored      refresh_pending   a lease that owed rows got some: take them from the step, as the slot may be another's
    read        get_best          the snapshot's rows over those of the slots, where those of the earliest run are
                                  asked for; under them otherwise (`recompute.py`)

Legend of shape suffixes: T = rows, B = block_size, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from routebook.errors import IntegrityError
from routebook.ledger.base import RowRange
from routebook.ledger.recompute import LATEST, Mask, goes_before
from routebook.ledger.spans import Index
from routebook.routes.provenance import ABSENT, Origin
from routebook.routes.schema import RouteSchema


@dataclass(frozen=True, slots=True)
class PendingBlock:
    """A block of an earlier run that lacked rows when the request gave it up."""

    block: int
    """Its place in the request."""
    own: bool
    """The request itself computes the rows; otherwise it took the block from the prefix cache."""
    run: int
    """The run that computed or took the block."""


@dataclass(slots=True)
class Entry:
    """What one request has beside the slots."""

    data: RowRange
    """Rows from position 0 on; absent ones may lie between."""
    run_T: Index
    """The run that computed, or took, each row."""
    pending: dict[int, PendingBlock] = field(default_factory=dict)
    """By lease, which names the block: the snapshot's pending block ids."""

    def fill(self, rows: RowRange, run: int, recompute: str) -> None:
        """Take the rows that a run computed or took, where they are chosen over what is there."""
        self.reach(rows.start + len(rows.origin_T))
        part = slice(rows.start, rows.start + len(rows.origin_T))
        origin_T, run_T = self.data.origin_T[part], self.run_T[part]
        came_T, held_T = rows.origin_T != ABSENT, origin_T != ABSENT
        take_T = came_T & (~held_T | _is_chosen(recompute, run, rows.origin_T, run_T, origin_T))
        if recompute == LATEST:
            told_T = rows.origin_T.copy()
            told_T[held_T & _is_own(told_T)] = Origin.RECOMPUTED
            rows = replace(rows, origin_T=told_T)
        run_T[take_T] = run
        _copy(rows, self.data, take_T, part)

    def reach(self, num_rows: int) -> None:
        """Have room for at least `num_rows` rows."""
        data = self.data
        more = num_rows - len(data.origin_T)
        if more > 0:
            self.data = RowRange(
                start=0,
                ids_TLK=np.pad(data.ids_TLK, ((0, more), (0, 0), (0, 0))),
                origin_T=np.pad(data.origin_T, (0, more)),
                version_T=np.pad(data.version_T, (0, more)),
            )
            self.run_T = np.pad(self.run_T, (0, more))

    def settled(self, note: PendingBlock, block_size: int, recompute: str) -> bool:
        """Whether nothing that comes for this block will be chosen."""
        part = slice(note.block * block_size, (note.block + 1) * block_size)
        origin_B, run_B = self.data.origin_T[part], self.run_T[part]
        comes = Origin.PREFILL if note.own else Origin.PREFIX_CACHE
        comes_B = np.full(len(origin_B), comes, np.uint8)
        final_B = origin_B != ABSENT
        final_B &= ~_is_chosen(recompute, note.run, comes_B, run_B, origin_B)
        return len(final_B) == block_size and bool(final_B.all())


class RoutedExpertsCache:
    """Entries by request. A request that was never preempted has none.

    Args:
        schema: layers, top-k and dtype of a row.
        block_size: tokens per KV block.
        recompute: one of `RECOMPUTE`.
    """

    def __init__(self, schema: RouteSchema, block_size: int, recompute: str) -> None:
        self.schema = schema
        self.recompute = recompute
        self.block_size = block_size
        self.entries: dict[str, Entry] = {}
        self.waiting: dict[int, set[str]] = {}
        """Lease -> the requests for which it is pending."""

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots."""
        data = [entry.data for entry in self.entries.values()]
        return sum(d.ids_TLK.nbytes + d.origin_T.nbytes + d.version_T.nbytes for d in data)

    def awaits(self, leases_M: Index) -> bool:
        """Whether rows under one of these leases are pending for somebody."""
        return bool(self.waiting) and not self.waiting.keys().isdisjoint(leases_M.tolist())

    def capture(
        self, request_id: str, rows: RowRange, run: int, pending: Mapping[int, PendingBlock]
    ) -> None:
        """Before the blocks of a request are freed: keep what is better than, or beyond, what is kept already.

        Args:
            request_id: whose rows.
            rows: the rows in its slots, from position 0 on.
            run: the run that computed or took them.
            pending: blocks that lack rows, by lease.
        """
        held = np.flatnonzero(rows.origin_T)
        if not len(held) and not pending:
            return
        entry = self._entry(request_id)
        stop = int(held[-1]) + 1 if len(held) else 0
        kept = RowRange(
            start=0,
            ids_TLK=rows.ids_TLK[:stop],
            origin_T=rows.origin_T[:stop],
            version_T=rows.version_T[:stop],
        )
        entry.fill(kept, run, self.recompute)
        for lease, note in pending.items():
            # A lease that is pending already was noted by an earlier run.
            chosen = lease not in entry.pending or self.recompute == LATEST
            if chosen and not self._is_settled(entry, note):
                entry.pending[lease] = note
                self.waiting.setdefault(lease, set()).add(request_id)

    def keep(self, request_id: str, rows: RowRange, run: int) -> None:
        """Keep rows that have no slot."""
        self._entry(request_id).fill(rows, run, self.recompute)

    def refresh_pending(self, lease: int, rows: RowRange) -> None:
        """After a step was stored: take the rows that came for a pending lease.

        Args:
            lease: in `waiting`.
            rows: what the step has for the block.
        """
        for request_id in tuple(self.waiting[lease]):
            entry = self.entries[request_id]
            note = entry.pending[lease]
            assert note.block == rows.start // self.block_size, "rows came for another place"
            entry.fill(rows if note.own else _as_shared(rows), note.run, self.recompute)
            if self._is_settled(entry, note):
                self._drop(request_id, entry, lease)

    def get_best(self, request_id: str, rows: RowRange, run: int) -> None:
        """Put the snapshot's rows over those of the slots of run `run`, in place, where they are chosen."""
        entry = self.entries.get(request_id)
        if entry is None:
            return
        kept, start = entry.data, rows.start
        stop = min(start + len(rows.origin_T), len(kept.origin_T))
        if start >= stop:
            return
        part, kept_run_T = slice(0, stop - start), entry.run_T[start:stop]
        kept = RowRange(
            start=start,
            ids_TLK=kept.ids_TLK[start:stop],
            origin_T=kept.origin_T[start:stop],
            version_T=kept.version_T[start:stop],
        )
        origin_T, held_T = rows.origin_T[part], kept.origin_T != ABSENT
        take_T = held_T & ((origin_T == ABSENT) | goes_before(self.recompute, kept_run_T, run))
        if self.recompute == LATEST:
            origin_T[held_T & _is_own(origin_T)] = Origin.RECOMPUTED
        _copy(kept, rows, take_T, part)

    def settle(self, request_id: str, leases: Iterable[int]) -> list[int]:
        """No more rows come under these leases for this request; return those nobody waits for now."""
        entry = self.entries.get(request_id)
        if entry is not None:
            for lease in leases:
                if lease in entry.pending:
                    self._drop(request_id, entry, lease)
        return [lease for lease in leases if lease not in self.waiting]

    def forget(self, request_id: str) -> list[int]:
        """The request is gone: drop its entry; return the leases that nobody waits for now."""
        entry = self.entries.get(request_id)
        freed = [] if entry is None else self.settle(request_id, tuple(entry.pending))
        self.entries.pop(request_id, None)
        return freed

    def check(self, living: Iterable[str]) -> None:
        """Recount entries and notes.

        Raises:
            IntegrityError: a snapshot of nobody, or a note that only one side knows.
        """
        orphans = self.entries.keys() - set(living)
        if orphans:
            raise IntegrityError(f"snapshots of {sorted(orphans)}, who do not live")
        notes = {(lease, name) for name, entry in self.entries.items() for lease in entry.pending}
        known = {(lease, name) for lease, names in self.waiting.items() for name in names}
        if notes != known or not all(self.waiting.values()):
            raise IntegrityError(f"pending blocks {sorted(notes)} are indexed as {sorted(known)}")

    def _entry(self, request_id: str) -> Entry:
        entry = self.entries.get(request_id)
        if entry is None:
            empty = RowRange(
                start=0,
                ids_TLK=np.zeros(self.schema.shape(0), self.schema.dtype),
                origin_T=np.zeros(0, np.uint8),
                version_T=np.zeros(0, np.uint32),
            )
            entry = self.entries[request_id] = Entry(empty, np.zeros(0, np.int64))
        return entry

    def _is_settled(self, entry: Entry, note: PendingBlock) -> bool:
        return entry.settled(note, self.block_size, self.recompute)

    def _drop(self, request_id: str, entry: Entry, lease: int) -> None:
        del entry.pending[lease]
        names = self.waiting[lease]
        names.remove(request_id)
        if not names:
            del self.waiting[lease]


def _is_own(origin_T: npt.NDArray[np.uint8]) -> Mask:
    own_T: Mask = (origin_T == Origin.PREFILL) | (origin_T == Origin.DECODE)
    return own_T


def _is_chosen(
    recompute: str,
    run: int,
    origin_T: npt.NDArray[np.uint8],
    held_run_T: Index,
    held_origin_T: npt.NDArray[np.uint8],
) -> Mask:
    """Whether rows of a run are chosen over held ones; what a run took goes before what it computes there."""
    chosen_T: Mask = (origin_T == Origin.PREFIX_CACHE) & (held_origin_T != Origin.PREFIX_CACHE)
    chosen_T &= held_run_T == run
    return chosen_T | goes_before(recompute, run, held_run_T)


def _as_shared(rows: RowRange) -> RowRange:
    present_T = rows.origin_T != ABSENT
    origin_T = np.where(present_T, Origin.PREFIX_CACHE, Origin.ABSENT).astype(np.uint8)
    return RowRange(
        start=rows.start, ids_TLK=rows.ids_TLK, origin_T=origin_T, version_T=rows.version_T
    )


def _copy(source: RowRange, target: RowRange, which_T: npt.NDArray[np.bool_], to: slice) -> None:
    """Copy the rows `which_T` of `source` into the rows `to` of `target`."""
    if not which_T.any():
        return
    places: Index = np.flatnonzero(which_T)
    target.ids_TLK[to][places] = source.ids_TLK[places]
    target.origin_T[to][places] = source.origin_T[places]
    target.version_T[to][places] = source.version_T[places]
