"""Published chunks whose last rows are on their way while the request that computes them has moved on.

A block is published when the step that fills it is scheduled. If the request is then aborted, or preempted and run
again, before that step is stored, the block is still valid and others may share it, so its rows must find it.

A chunk is a number that names the place of the rows: a chunk of a row pool, or the lease of a KV block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class LateRequest:
    """What one request still owes; it may be gone, or live in a later run."""

    prompt_tokens: int
    run: int
    """The last run that owes rows."""
    chunk_of: dict[tuple[int, int], int] = field(default_factory=dict)
    """`(run, block) -> chunk`."""


class LateChunks:
    """Chunks waiting for rows, by request. It holds no reference: a chunk that nobody shares is forgotten."""

    def __init__(self) -> None:
        self._requests: dict[str, LateRequest] = {}
        self._owner: dict[int, tuple[str, int, int]] = {}

    def __len__(self) -> int:
        return len(self._owner)

    def __iter__(self) -> Iterator[int]:
        return iter(self._owner)

    def add(self, request_id: str, prompt_tokens: int, run: int, block: int, chunk: int) -> None:
        """Expect rows of run `run` of a request for `chunk`."""
        late = self._requests.setdefault(request_id, LateRequest(prompt_tokens, run))
        late.run = max(late.run, run)
        late.chunk_of[run, block] = chunk
        self._owner[chunk] = (request_id, run, block)

    def get(self, request_id: str) -> LateRequest | None:
        """What this request owes, or None."""
        return self._requests.get(request_id)

    def involves(self, request_ids: Sequence[str]) -> bool:
        """Whether one of these requests owes rows."""
        return bool(self._requests) and not self._requests.keys().isdisjoint(request_ids)

    def forget_chunks(self, chunks_C: npt.NDArray[np.int64] | Sequence[int]) -> None:
        """Expect nothing more for these chunks; unknown ones are ignored."""
        if not self._owner:
            return
        for chunk in map(int, chunks_C):
            if chunk in self._owner:
                request_id, run, block = self._owner.pop(chunk)
                late = self._requests[request_id]
                del late.chunk_of[run, block]
                if not late.chunk_of:
                    del self._requests[request_id]

    def forget_request(self, request_id: str) -> None:
        """Expect nothing more of this request."""
        late = self._requests.get(request_id)
        if late is not None:
            self.forget_chunks(np.array(list(late.chunk_of.values()), np.int64))
