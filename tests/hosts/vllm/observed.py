"""What a scheduler of vLLM did, seen from outside of the host's code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.hosts.vllm.oracle import Tally


@contextmanager
def scheduler(watched: Any, tally: Tally) -> Iterator[None]:
    """Count preemptions and guesses while inside."""
    preempt, update = watched._preempt_request, watched.update_from_output

    def counting_preempt(*args: Any, **kwargs: Any) -> Any:
        tally.count(preempted=1)
        return preempt(*args, **kwargs)

    def counting_update(scheduler_output: Any, runner_output: Any) -> Any:
        for request_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            index = runner_output.req_id_to_index[request_id]
            accepted = max(len(runner_output.sampled_token_ids[index]) - 1, 0)
            tally.count(accepted=accepted, rejected=len(drafts) - accepted)
        return update(scheduler_output, runner_output)

    watched._preempt_request, watched.update_from_output = counting_preempt, counting_update
    try:
        yield
    finally:
        del watched._preempt_request, watched.update_from_output
