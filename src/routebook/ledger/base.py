"""The seam of the ledger: who owns which row, from the step that made it to the answer that carries it.

The scheduler drives one ledger, in one thread. A request lives from `begin` to `release`; its rows are complete
and exact in between, whatever happens to the KV blocks. Vocabulary: row `t` of a request is the choice made while
its token at position `t` was the input of a forward pass.

Order of calls in one step::

    schedule:            begin / share / assign / publish / withdraw      (the plan of the step)
    update_from_output:  store_batch(step)                                (before anything else of it is looked at)
                         read / release                                   (answers; release before the KV blocks go)

Steps are stored in the order in which they were scheduled. With asynchronous scheduling the plan of a later step may
come before the `store_batch` of an earlier one. The run of a request is the number of times it was preempted: run 0
until its first preemption. Each run computes a contiguous range of positions that starts behind the blocks it took
from the prefix cache, so a block that gets full was computed whole by one run, or taken whole.

Legend of shape suffixes: T = rows of a step or range, R = requests of a step, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from routebook.errors import LedgerError
from routebook.routes.provenance import ABSENT, Provenance, provenance_of_rows
from routebook.routes.schema import RouteSchema

RouteIds = npt.NDArray[np.unsignedinteger]

_MAX_VERSION = 2**32 - 1


class ReleaseReason(Enum):
    """Why a request gives up its KV blocks."""

    FINISHED = "finished"
    ABORTED = "aborted"
    PREEMPTED = "preempted"
    """The request waits and will run again: its rows stay, only its blocks go."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """All rows of one executed step, as the worker ran it.

    The order is that of the batch that ran, told by the worker itself: neither a scheduler's dict order nor a
    counter that has moved on since may decide which row belongs to whom.
    """

    request_ids: Sequence[str]
    """Requests in batch order, each once."""

    starts_R: npt.NDArray[np.int64]
    """Position of the first row of each request in this step."""

    counts_R: npt.NDArray[np.int64]
    """Rows of each request; they sum to T. Rejected drafts are cut before."""

    ids_TLK: RouteIds
    """Expert ids in the schema's dtype, `[sum(counts_R), L, K]`, contiguous. From `store_batch` on the array belongs
    to the ledger, which may keep it and write its rows later; nobody changes it any more."""

    weight_version: int
    """Version of the weights that ran the step, fits uint32."""

    runs_R: npt.NDArray[np.int64] | None = None
    """Run of each request when the step was scheduled: how often it had been preempted before. None says that no
    request was preempted between the plan of this step and now, as holds when each step is stored before the next
    one is planned; an asynchronous scheduler must tell."""

    def check(self, schema: RouteSchema) -> None:
        """Refuse a step that contradicts itself or the schema.

        Raises:
            LedgerError: with the value that does not fit.
        """
        rows = sum(self._check_requests())
        ids = self.ids_TLK
        if ids.dtype != schema.dtype or ids.shape != schema.shape(rows):
            raise LedgerError(
                f"ids {ids.dtype}{list(ids.shape)} are not {schema.dtype}{list(schema.shape(rows))}"
            )
        if not ids.flags.c_contiguous:
            raise LedgerError(f"ids of strides {ids.strides} are not contiguous; copy them first")
        if not 0 <= self.weight_version <= _MAX_VERSION:
            raise LedgerError(f"weight_version={self.weight_version} does not fit uint32")

    def _check_requests(self) -> list[int]:
        """Check what is told of each request, and return the counts."""
        num_requests = len(self.request_ids)
        if len(set(self.request_ids)) != num_requests:
            raise LedgerError(f"a request occurs twice in the step {list(self.request_ids)}")
        _check_column("starts_R", self.starts_R, num_requests)
        if self.runs_R is not None:
            _check_column("runs_R", self.runs_R, num_requests)
        return _check_column("counts_R", self.counts_R, num_requests)


def _check_column(name: str, column_R: npt.NDArray[np.int64], num_requests: int) -> list[int]:
    if column_R.shape != (num_requests,) or column_R.dtype != np.int64:
        raise LedgerError(
            f"{name} {column_R.dtype}{list(column_R.shape)} is not int64[{num_requests}]"
        )
    # A list is faster than an array here: a step has few requests, and most have been met a moment ago.
    values: list[int] = column_R.tolist()
    if num_requests and min(values) < 0:
        raise LedgerError(f"{name} holds {min(values)}; none may be negative")
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRange:
    """Rows `[start, start + T)` of one request, as read from a ledger. Arrays are private copies."""

    start: int
    ids_TLK: RouteIds
    origin_T: npt.NDArray[np.uint8]
    """:class:`~routebook.routes.provenance.Origin` per row; `ABSENT` rows hold `schema.absent`."""
    version_T: npt.NDArray[np.uint32]

    def clear_absent(self, absent: int) -> None:
        """Let absent rows hold `absent` and version 0, whatever was read there."""
        if not self.origin_T.all():
            absent_T = self.origin_T == ABSENT
            self.ids_TLK[absent_T] = absent
            self.version_T[absent_T] = 0

    @property
    def provenance(self) -> tuple[Provenance, ...]:
        """The origins as maximal ranges."""
        return provenance_of_rows(self.origin_T, self.version_T, self.start)


@dataclass(frozen=True, slots=True)
class LedgerUsage:
    """What a ledger holds right now; `requests` and `request_chunks` are zero when no request lives."""

    requests: int
    """Living requests, the preempted ones included."""
    request_chunks: int
    """References that living requests hold to stored blocks; a block that n requests share counts n times."""
    published: int
    """Block hashes whose rows can be shared."""
    capacity_nbytes: int
    """Bytes allocated for rows, the unused part included."""


class Ledger(ABC):
    """Rows of all living requests, and of the full KV blocks that later requests may share.

    Block `i` of a request covers its positions `[i * block_size, (i + 1) * block_size)`; a block hash is chained, so
    it names the tokens of its block and of every block before it.
    """

    schema: RouteSchema
    block_size: int
    recompute: str
    """Whose row a position has if several runs have one: that of the `earliest` run or of the `latest`. In a run, a
    row that it took from the prefix cache goes before one that it computes there all the same. The order in which
    rows arrive does not matter. An own row that goes before one of an earlier run has the origin `RECOMPUTED`."""

    @abstractmethod
    def begin(self, request_id: str, num_prompt_tokens: int) -> None:
        """Start a request in run 0. Rows below `num_prompt_tokens` will be `PREFILL`, later ones `DECODE`.

        An id may be used again once its request is released and every step that ran it is stored.

        Raises:
            LedgerError: a request of this id lives already, or `num_prompt_tokens` is negative.
        """

    @abstractmethod
    def share(self, request_id: str, block_hashes: Sequence[bytes]) -> None:
        """The request took its first `len(block_hashes)` KV blocks from the prefix cache, for its current run.

        Called at most once per run, before the run's first step. Their rows are those of whoever computed the
        blocks, origin `PREFIX_CACHE`, also when that step has been scheduled but not stored yet; until then they
        read as absent. Which of them are read by a request that had rows of an earlier run, or gets them later, is
        the ledger's choice (see `recompute`). A hash that is not published leaves absent rows.

        Raises:
            LedgerError: no such request.
        """

    @abstractmethod
    def assign(self, request_id: str, block_ids: Sequence[int]) -> None:
        """These KV blocks now make up the next part of the request's block table, for its current run.

        Called when the scheduler plans, after `share`: first the blocks of `share`, in their order, then blocks
        that the KV pool has just handed out to this request alone, in order of position. Each is assigned before
        it is published and before the step that computes it is stored. With `release` the request gives all of
        them up, and the pool may hand them to others while steps of the old owner are still on the way.

        Raises:
            LedgerError: no such request. A ledger that keeps its rows by KV block also refuses a block that the
                pool does not have, one that occurs twice, one that is not the block published under the hash by
                which it was shared; in `share`, a run that has blocks already; and in `publish` and `store_batch` a
                block that was never assigned.
        """

    @abstractmethod
    def publish(self, request_id: str, block_index: int, block_hash: bytes) -> None:
        """KV block `block_index` of the request is full (once the scheduled step has run) and has this hash.

        Called in the run that computes the block, from the plan of the step that fills it on. A hash that is
        published already keeps its rows. When the request recomputes a block whose rows it has from an earlier
        computation, what is published are the rows of the recomputation, all of them, since they made the block,
        whichever the request itself reads. Published rows outlive the request.

        Raises:
            LedgerError: no such request, `block_index` is negative, or the hash is not published and the current
                run took the block from the prefix cache, so that it has no rows of its own to publish.
        """

    @abstractmethod
    def withdraw(self, block_hashes: Sequence[bytes]) -> None:
        """No KV block has these hashes any more; unknown hashes are ignored. Requests sharing them keep the rows."""

    @abstractmethod
    def available(self, block_hashes: Sequence[bytes]) -> int:
        """How many leading hashes are published, hence safe for a request that wants its rows.

        Rows of a published block are stored, or are those of a step that is scheduled already.
        """

    @abstractmethod
    def store_batch(self, step: StepRows) -> None:
        """Take over a whole step. A position that has a row of the same run keeps it.

        A ledger may write the rows later, together with those of other steps: no call tells the difference. Only
        `step.ids_TLK` is kept; the other arrays may be changed after the call.

        Requests that are gone, or were never begun, are skipped; only rows that complete a block which such a
        request had published reach that block, for those who share it.

        Raises:
            LedgerError: the step does not fit the schema or itself (see `StepRows.check`), or names a run that has
                not begun; nothing is written.
        """

    @abstractmethod
    def read(self, request_id: str, start: int, stop: int) -> RowRange:
        """Copy rows `[start, stop)` of a living request; what was never stored is absent, never invented.

        Raises:
            LedgerError: no such request, or not `0 <= start <= stop`.
        """

    @abstractmethod
    def release(self, request_id: str, reason: ReleaseReason) -> None:
        """The request leaves (`FINISHED`, `ABORTED`: its rows go) or waits (`PREEMPTED`: its rows stay).

        After `PREEMPTED` the request lives on in its next run; its rows can be read while it waits.

        Raises:
            LedgerError: no such request.
        """

    @abstractmethod
    def reset(self) -> None:
        """The prefix cache was reset: withdraw everything published. Living requests keep their rows."""

    @abstractmethod
    def usage(self) -> LedgerUsage:
        """Count what is held."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Recount every reference.

        Raises:
            IntegrityError: a leak, a double owner or a contradiction, with its place.
        """
