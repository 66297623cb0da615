"""One request of vLLM whose rows are kept, for itself or for those who share its blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """What the host notes about a request from the time it is added until it has left."""

    request: Any
    """vLLM's own `Request`: its tokens, its block hashes, and how often it was preempted, as they are now."""

    wants_rows: bool
    """Whether its answer carries rows."""

    next_row: int
    """Position of the first row that was not handed out yet."""

    first_row: int = 0
    """Position of the first row that is handed out at all."""

    run: int = 0
    """Times that the ledger was told of a preemption."""

    block_ids: list[int] = field(default_factory=list)
    """KV blocks of the current run, in order of position."""

    num_published: int = 0
    """Leading blocks of the current run that the ledger knows by key."""

    @property
    def request_id(self) -> str:
        """vLLM's id, unique among living requests."""
        request_id: str = self.request.request_id
        return request_id

    @property
    def num_known_rows(self) -> int:
        """Rows that a complete answer has by now: one for each committed token but the last."""
        rows: int = self.request.num_tokens - 1
        return rows
