"""What a vLLM `SchedulerOutput` says about positions and KV blocks of each of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Where one request goes on in a step, and which blocks it was given for that."""

    is_fresh: bool
    """A run of the request begins here: it is new, or was preempted before."""
    start: int
    """Position of its first row in the step; of a fresh run, everything before came from the prefix cache."""
    block_ids: Sequence[int]
    """Of a fresh run its whole block table, else the blocks that were added."""


def block_parts(scheduler_output: Any, group: int) -> dict[str, BlockPart]:
    """The parts of all requests that a step schedules.

    Args:
        scheduler_output: vLLM's `SchedulerOutput`.
        group: KV cache group whose blocks are meant.
    """
    parts = {
        new.req_id: BlockPart(True, new.num_computed_tokens, new.block_ids[group])
        for new in scheduler_output.scheduled_new_reqs
    }
    cached = scheduler_output.scheduled_cached_reqs
    rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
    for request_id, block_ids, start in rows:
        is_fresh = request_id in cached.resumed_req_ids
        added = block_ids[group] if block_ids is not None else ()
        parts[request_id] = BlockPart(is_fresh, start, added)
    return parts
