"""The state machine sees each of these faults, which other systems have had; a machine that cannot fail proves nothing.

Every fault is put in at a seam, so that it stays the same whatever is behind it. None is found by a special test: the
machine has to come across it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from routebook.capture.buffer import CaptureBuffer
from routebook.capture.outputs import RoutedExpertsTensors
from routebook.engine import kv_cache_manager as kv_cache_module
from routebook.engine import scheduler as scheduler_module
from routebook.engine.block_hash import extend_block_hashes
from routebook.engine.config import LEDGERS
from routebook.engine.step import NewRequestData
from routebook.errors import RoutebookError
from routebook.ledger import KVSlotLedger, Ledger, RequestLedger
from routebook.ledger.base import ReleaseReason, RowRange, StepRows
from tests.engine.machine import TaggedMachine, run_machine
from tests.engine.totals import Totals

MOST_EXAMPLES = 1000
"""A few dozen are usual."""

Patch = pytest.MonkeyPatch


def take_latest_row(patch: Patch) -> None:
    """What is read is the last computation of a position instead of the first."""
    for kind in (RequestLedger, KVSlotLedger):
        _take_latest(patch, kind)


def _take_latest(patch: Patch, kind: type[Ledger]) -> None:
    store_batch, read = kind.store_batch, kind.read

    def stored(self: Any, step: StepRows) -> None:
        store_batch(self, step)
        latest = self.__dict__.setdefault("latest", {})
        for place, row in zip(_places(step), step.ids_TLK, strict=True):
            latest[place] = row, step.weight_version

    def latest_read(self: Any, request_id: str, start: int, stop: int) -> RowRange:
        rows = read(self, request_id, start, stop)
        for t in np.flatnonzero(rows.origin_T).tolist():
            found = self.__dict__.get("latest", {}).get((request_id, start + t))
            if found is not None:
                rows.ids_TLK[t], rows.version_T[t] = found
        return rows

    patch.setattr(kind, "store_batch", stored)
    patch.setattr(kind, "read", latest_read)


def _places(step: StepRows) -> Iterator[tuple[str, int]]:
    starts, counts = step.starts_R.tolist(), step.counts_R.tolist()
    for request_id, start, count in zip(step.request_ids, starts, counts, strict=True):
        yield from ((request_id, position) for position in range(start, start + count))


def swap_rows(patch: Patch) -> None:
    """The first rows of two requests change places on their way to the ledger."""

    def swapped(**step: Any) -> StepRows:
        ids_TLK, counts_R = step["ids_TLK"].copy(), step["counts_R"]
        if len(counts_R) > 1:
            ids_TLK[[0, counts_R[0]]] = ids_TLK[[counts_R[0], 0]]
        return StepRows(**{**step, "ids_TLK": ids_TLK})

    patch.setattr(scheduler_module, "StepRows", swapped)


def trust_scheduler_order(patch: Patch) -> None:
    """Rows are given to requests in another order than that of the batch that ran."""

    def sorted_step(**step: Any) -> StepRows:
        return StepRows(**{**step, "request_ids": sorted(step["request_ids"])})

    patch.setattr(scheduler_module, "StepRows", sorted_step)


def share_the_buffer(patch: Patch) -> None:
    """A snapshot is a view of a buffer that the next step overwrites."""
    snapshot = CaptureBuffer.snapshot

    def shared(self: Any) -> RoutedExpertsTensors:
        ids_TLK = snapshot(self).ids_TLK
        empty = torch.empty(self.max_tokens, *ids_TLK.shape[1:], dtype=ids_TLK.dtype)
        view_TLK = self.__dict__.setdefault("shared", empty)[: len(ids_TLK)]
        return RoutedExpertsTensors(view_TLK.copy_(ids_TLK))

    patch.setattr(CaptureBuffer, "snapshot", shared)


def forget_preemption(patch: Patch) -> None:
    """The ledger is not told that a request has lost its blocks."""
    _release(patch, lambda reason: reason is not ReleaseReason.PREEMPTED)


def leak_aborted(patch: Patch) -> None:
    """The rows of an aborted request are never given back."""
    _release(patch, lambda reason: reason is not ReleaseReason.ABORTED)


def _release(patch: Patch, told: Callable[[ReleaseReason], bool]) -> None:
    def released(kind: type[Ledger]) -> Callable[..., None]:
        release = kind.release

        def wrapped(self: Any, request_id: str, reason: ReleaseReason) -> None:
            if told(reason):
                release(self, request_id, reason)

        return wrapped

    for kind in (RequestLedger, KVSlotLedger):
        patch.setattr(kind, "release", released(kind))


def keep_hashes_after_reset(patch: Patch) -> None:
    """Blocks that rest on those of old weights get the hashes of new ones."""

    def rootless(
        hashes: list[bytes], token_ids: list[int], block_size: int, root: bytes = b""
    ) -> None:
        extend_block_hashes(hashes, token_ids, block_size)

    patch.setattr(kv_cache_module, "extend_block_hashes", rootless)


def version_behind(patch: Patch) -> None:
    """Rows carry the version before that of the weights that made them."""

    def behind(**step: Any) -> StepRows:
        return StepRows(**{**step, "weight_version": max(0, step["weight_version"] - 1)})

    patch.setattr(scheduler_module, "StepRows", behind)


def rows_one_off(patch: Patch) -> None:
    """The rows of a prompt's later chunks are stored one position too early."""

    def shifted(**step: Any) -> StepRows:
        starts_R = step["starts_R"]
        return StepRows(
            **{**step, "starts_R": starts_R - ((starts_R > 0) & (step["counts_R"] > 1))}
        )

    patch.setattr(scheduler_module, "StepRows", shifted)


def forget_runs(patch: Patch) -> None:
    """A late row of a preempted request passes for one of its present run."""

    def runless(**step: Any) -> StepRows:
        return StepRows(**{**step, "runs_R": None})

    patch.setattr(scheduler_module, "StepRows", runless)


def share_blocks_without_rows(patch: Patch) -> None:
    """A prefix counts as found although nobody recorded its rows."""
    for kind in (RequestLedger, KVSlotLedger):
        patch.setattr(kind, "available", lambda self, block_hashes: len(block_hashes))


def ignore_force(patch: Patch) -> None:
    """A continued completion is computed along routes of its own."""

    def free(**new: Any) -> NewRequestData:
        return NewRequestData(**{**new, "forced": None})

    patch.setattr(scheduler_module, "NewRequestData", free)


@dataclass(frozen=True)
class Fault:
    """A fault, and the ledgers and depths that it needs to show."""

    put_in: Callable[[Patch], None]
    ledgers: tuple[str, ...] = LEDGERS
    depths: tuple[int, ...] = (1, 2, 3)


FAULTS = (
    *(Fault(take_latest_row, ledgers=(ledger,)) for ledger in LEDGERS),
    Fault(swap_rows),
    Fault(trust_scheduler_order),
    Fault(share_the_buffer, depths=(2, 3)),
    *(Fault(forget_preemption, ledgers=(ledger,)) for ledger in LEDGERS),
    Fault(leak_aborted),
    Fault(keep_hashes_after_reset),
    Fault(version_behind),
    Fault(rows_one_off),
    *(Fault(forget_runs, ledgers=(ledger,), depths=(2, 3)) for ledger in LEDGERS),
    Fault(share_blocks_without_rows),
    Fault(ignore_force),
)


@pytest.mark.parametrize(
    "fault", FAULTS, ids=lambda fault: "-".join([fault.put_in.__name__, *fault.ledgers])
)
def test_the_machine_finds(fault: Fault, monkeypatch: Patch) -> None:
    fault.put_in(monkeypatch)
    with pytest.raises((AssertionError, RoutebookError)):
        run_machine(
            TaggedMachine,
            MOST_EXAMPLES,
            Totals(),
            shrink=False,
            ledgers=fault.ledgers,
            depths=fault.depths,
        )
