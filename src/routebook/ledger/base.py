"""The seam of the ledger: who owns which row, from the step that made it to the answer that carries it.

The scheduler drives one ledger, in one thread. A request lives from `begin` to `release`; its rows are complete
and exact in between, whatever happens to the KV blocks. Vocabulary: row `t` of a request is the choice made while
its token at position `t` was the input of a forward pass.

Order of calls in one step::

    schedule:            begin / share / publish / withdraw      (the plan of the step)
    update_from_output:  store_batch(step)                       (before anything else of it is looked at)
                         read / release                          (answers)

Legend of shape suffixes: T = rows of a step or range, R = requests of a step, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from routebook.routes.provenance import Provenance, provenance_of_rows
from routebook.routes.schema import RouteSchema

RouteIds = npt.NDArray[np.unsignedinteger]


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
    """Requests in batch order."""

    starts_R: npt.NDArray[np.int64]
    """Position of the first row of each request in this step."""

    counts_R: npt.NDArray[np.int64]
    """Rows of each request; they sum to T. Rejected drafts are cut before."""

    ids_TLK: RouteIds
    """Expert ids in the schema's dtype, `[sum(counts_R), L, K]`, contiguous."""

    weight_version: int
    """Version of the weights that ran the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRange:
    """Rows `[start, start + T)` of one request, as read from a ledger. Arrays are private copies."""

    start: int
    ids_TLK: RouteIds
    origin_T: npt.NDArray[np.uint8]
    """:class:`~routebook.routes.provenance.Origin` per row; `ABSENT` rows hold `schema.absent`."""
    version_T: npt.NDArray[np.uint32]

    @property
    def provenance(self) -> tuple[Provenance, ...]:
        """The origins as maximal ranges."""
        return provenance_of_rows(self.origin_T, self.version_T, self.start)


@dataclass(frozen=True, slots=True)
class LedgerUsage:
    """What a ledger holds right now; all but `published` are zero when no request lives."""

    requests: int
    request_chunks: int
    published: int
    capacity_nbytes: int


class Ledger(ABC):
    """Rows of all living requests, and of the full KV blocks that later requests may share.

    Block `i` of a request covers its positions `[i * block_size, (i + 1) * block_size)`; a block hash is chained, so
    it names the tokens of its block and of every block before it.
    """

    schema: RouteSchema
    block_size: int

    @abstractmethod
    def begin(self, request_id: str, num_prompt_tokens: int) -> None:
        """Start a request. Rows below `num_prompt_tokens` will be `PREFILL`, later ones `DECODE`.

        Raises:
            LedgerError: a request of this id lives already.
        """

    @abstractmethod
    def share(self, request_id: str, block_hashes: Sequence[bytes]) -> None:
        """The request took its first `len(block_hashes)` KV blocks from the prefix cache.

        Their rows are those of whoever computed the blocks, origin `PREFIX_CACHE`, also when that step has been
        scheduled but not stored yet. Positions for which the request owns a row already (it ran before, and was
        preempted) keep it: the earliest computation wins. A hash that is not published leaves absent rows.

        Raises:
            LedgerError: no such request.
        """

    @abstractmethod
    def publish(self, request_id: str, block_index: int, block_hash: bytes) -> None:
        """KV block `block_index` of the request is full (once the scheduled step has run) and has this hash.

        A hash that is published already keeps its rows. When the request recomputes a block whose rows it owns
        from an earlier computation, what is published are the rows of the recomputation, since they made the block,
        while the request itself keeps its earlier ones.

        Raises:
            LedgerError: no such request.
        """

    @abstractmethod
    def withdraw(self, block_hashes: Sequence[bytes]) -> None:
        """The KV blocks of these hashes were evicted; unknown hashes are ignored. Requests sharing them keep the rows."""

    @abstractmethod
    def available(self, block_hashes: Sequence[bytes]) -> int:
        """How many leading hashes are published, hence safe for a request that wants its rows."""

    @abstractmethod
    def store_batch(self, step: StepRows) -> None:
        """Write a whole step at once. Requests that are gone are skipped; a position that has a row keeps it.

        Raises:
            LedgerError: shapes or dtype do not fit the schema; nothing is written.
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
