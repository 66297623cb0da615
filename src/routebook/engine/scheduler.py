"""Decides what runs next, and gives the results of a step to those they belong to.

A step maps requests to numbers of tokens; prompt chunks and decodes mix freely. Running requests come first, in
order of arrival; when blocks run out, the youngest running request is preempted and recomputed later. Then waiting
requests are admitted as long as budget, places and blocks last.

Steps may be planned before the results of earlier ones are known. A token that a step under way will sample is then
a placeholder: the scheduler plans the step that will take it as input, and the worker, who samples it, fills it in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from routebook.engine.config import SchedulerConfig
from routebook.engine.input_batch import IntArray
from routebook.engine.kv_cache_manager import KVCacheManager
from routebook.engine.request import FinishReason, Request, RequestStatus
from routebook.engine.step import ForcedRows, ModelRunnerOutput, NewRequestData, SchedulerOutput
from routebook.errors import IntegrityError
from routebook.ledger.base import Ledger, ReleaseReason, StepRows


@dataclass(slots=True)
class _Plan:
    """The step being planned."""

    budget: int
    capture: bool
    counts: dict[str, int] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)
    new_requests: list[NewRequestData] = field(default_factory=list)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)

    def add(self, request: Request, num_tokens: int) -> None:
        """Compute the next `num_tokens` tokens of a request; after the last one known a new one is sampled."""
        self.counts[request.request_id] = num_tokens
        self.starts[request.request_id] = request.num_computed_tokens
        self.runs[request.request_id] = request.num_preemptions
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens == request.num_tokens + request.num_placeholders:
            request.num_placeholders += 1
        if not self.capture:
            request.rows_from = request.num_computed_tokens
        self.budget -= num_tokens


class Scheduler:
    """Waiting and running requests over one KV cache and one ledger."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        ledger: Ledger,
        *,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.config = config
        self.cache = cache
        self.ledger = ledger
        self.eos_token_ids = eos_token_ids
        self.requests: dict[str, Request] = {}
        self.weight_version = 0
        self.num_preemptions = 0
        self._num_wanting_rows = 0
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._dropped: list[str] = []

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.ledger.begin(request.request_id, request.num_prompt_tokens)
        self.requests[request.request_id] = request
        self._waiting.append(request)
        self._num_wanting_rows += request.wants_capture

    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step and take the blocks that it needs; None when nothing can run now.

        The step is captured if any living request wants rows, so that prefixes computed meanwhile have theirs.
        """
        plan = _Plan(self.config.max_num_batched_tokens, capture=self._num_wanting_rows > 0)
        num_preemptions = self.num_preemptions
        self._plan_running(plan)
        if self.num_preemptions == num_preemptions:
            self._plan_waiting(plan)
        return self._close_plan(plan) if plan.counts else None

    def update_from_output(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[Request]:
        """Take over the results of a step; return the requests that got a token.

        The ledger has the whole step before anything else of it is looked at.
        """
        if output.side.routed_experts is not None:
            self.ledger.store_batch(
                StepRows(
                    request_ids=output.request_ids,
                    starts_R=output.starts_R,
                    counts_R=output.counts_R,
                    ids_TLK=output.side.routed_experts.ids_TLK,
                    weight_version=step.weight_version,
                    runs_R=self._runs(step, output),
                )
            )
        else:
            assert not step.capture, "the worker lost the rows of a step"
        updated = []
        for request_id, token_id in output.sampled_token_ids.items():
            request = self.requests.get(request_id)
            if request is None or request.status is RequestStatus.FINISHED:
                continue
            self._append_token(request, token_id, output)
            updated.append(request)
        return updated

    def _runs(self, step: SchedulerOutput, output: ModelRunnerOutput) -> IntArray | None:
        """Run of each request in the step; with one step at a time it is always the present one."""
        if self.config.max_steps_in_flight == 1:
            return None
        return np.array([step.runs[request_id] for request_id in output.request_ids], np.int64)

    def finish(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End a request: its blocks go back, the worker forgets it. Its rows stay until `release`."""
        request.finish_reason = reason
        request.stop_reason = stop_reason
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._dropped.append(request.request_id)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self._num_wanting_rows -= request.wants_capture
        self.cache.free(request)

    def take_dropped(self) -> list[str]:
        """Requests that the worker shall forget; each is told once."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def release(self, request: Request) -> None:
        """The answer of a finished request has been made: forget it and its rows."""
        assert request.status is RequestStatus.FINISHED, "release a request that still runs"
        aborted = request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
        reason = ReleaseReason.ABORTED if aborted else ReleaseReason.FINISHED
        self.ledger.release(request.request_id, reason)
        del self.requests[request.request_id]

    def check_integrity(self) -> None:
        """Recount blocks and rows. When no request lives, nothing may be held but the prefix cache.

        Raises:
            IntegrityError: a leak or a contradiction.
        """
        self.cache.check_integrity(self.requests.values())
        self.ledger.check_integrity()
        usage = self.ledger.usage()
        if usage.requests != len(self.requests):
            raise IntegrityError(f"{usage.requests} ledger entries, {len(self.requests)} requests")
        if not self.requests and usage.request_chunks:
            raise IntegrityError(f"{usage.request_chunks} chunks of rows are held by no request")

    def _plan_running(self, plan: _Plan) -> None:
        """Continue running requests, oldest first."""
        index = 0
        while index < len(self._running) and plan.budget > 0:
            request = self._running[index]
            num_tokens = min(request.num_unscheduled_tokens, plan.budget)
            if num_tokens == 0:
                index += 1
                continue
            new_block_ids = self._grow(request, request.num_computed_tokens + num_tokens)
            if new_block_ids is None:
                break
            if new_block_ids:
                plan.new_block_ids[request.request_id] = new_block_ids
            plan.add(request, num_tokens)
            self.cache.name_full_blocks(request)
            index += 1

    def _grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Get blocks, preempting the youngest until there are enough; None if that hit the request itself."""
        while (new_block_ids := self.cache.grow(request, num_tokens)) is None:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return None
        return new_block_ids

    def _preempt(self, request: Request) -> None:
        """Take the blocks of the youngest request. It was not planned in this step: planning goes oldest first.

        Steps under way still run it, in its old blocks; their tokens and rows are taken over when they arrive.
        """
        self._running.pop()
        self.ledger.release(request.request_id, ReleaseReason.PREEMPTED)
        self.cache.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._waiting.appendleft(request)
        self._dropped.append(request.request_id)
        self.num_preemptions += 1

    def _plan_waiting(self, plan: _Plan) -> None:
        """Admit waiting requests in order of arrival, preempted ones first."""
        while self._waiting and plan.budget > 0 and len(self._running) < self.config.max_num_seqs:
            request = self._waiting[0]
            if request.num_placeholders:
                # Preempted with tokens under way: it can be given back to the worker once they are known.
                break
            num_tokens = self.cache.admit(request, plan.budget)
            if num_tokens == 0:
                break
            self._waiting.popleft()
            self._running.append(request)
            request.status = RequestStatus.RUNNING
            plan.new_requests.append(_new_request_data(request))
            plan.add(request, num_tokens)
            self.cache.name_full_blocks(request)

    def _close_plan(self, plan: _Plan) -> SchedulerOutput:
        return SchedulerOutput(
            num_scheduled_tokens=plan.counts,
            num_computed_tokens=plan.starts,
            runs=plan.runs,
            weight_version=self.weight_version,
            new_requests=plan.new_requests,
            new_block_ids=plan.new_block_ids,
            dropped_request_ids=self.take_dropped(),
            capture=plan.capture,
        )

    def _append_token(self, request: Request, token_id: int, output: ModelRunnerOutput) -> None:
        """Commit one sampled token and see whether it ends the completion."""
        request.token_ids.append(token_id)
        request.num_placeholders -= 1
        if request.request_id in output.logprobs:
            request.logprobs.append(output.logprobs[request.request_id])
        if request.status is RequestStatus.RUNNING:
            self.cache.name_full_blocks(request)
        params = request.params
        if token_id in self.eos_token_ids and not params.ignore_eos:
            self.finish(request, FinishReason.STOP)
        elif token_id in params.stop_token_ids:
            self.finish(request, FinishReason.STOP, token_id)
        elif request.num_tokens >= request.max_num_tokens:
            self.finish(request, FinishReason.LENGTH)


def _new_request_data(request: Request) -> NewRequestData:
    return NewRequestData(
        request_id=request.request_id,
        token_ids=np.array(request.token_ids, np.int32),
        block_ids=list(request.block_ids),
        sampling_params=request.params,
        seed=request.seed,
        forced=_forced_rows(request),
    )


def _forced_rows(request: Request) -> ForcedRows | None:
    if not request.forced or request.earlier is None:
        return None
    earlier = request.earlier
    return ForcedRows(start=earlier.start, ids_TLK=earlier.ids_TLK, valid_T=earlier.valid_T)
