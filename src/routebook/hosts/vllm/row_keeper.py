"""Keeps the rows of vLLM's requests: the scheduler's side, without a line of vLLM in it.

It is told the same four things in every step, in this order::

    begin                      a request was added
    plan(scheduler_output)     a step was scheduled; blocks were handed out, shared and filled
    store(..., runner_output)  the step has run: its rows go to the ledger in one write, before anything else
    deliver(outputs)           vLLM has committed the tokens: every answer gets the rows that became final with them

and `drop` whenever requests leave. Rows go out with the tokens that make them final, not at the end: a stop string is
found by the front end, and an aborted request has no end, yet both have all rows of the tokens that were returned.

Legend of shape suffixes: T = rows, L = MoE layers, H = hidden layers, K = top-k.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from routebook.errors import IntegrityError, RequestError
from routebook.hosts.vllm.block_parts import block_parts
from routebook.hosts.vllm.block_sharing import BlockSharing
from routebook.hosts.vllm.config import HostConfig
from routebook.hosts.vllm.late_ledger import LateLedger
from routebook.hosts.vllm.message import attached
from routebook.hosts.vllm.step_plan import PlannedRequest, StepPlan, StoredStep
from routebook.hosts.vllm.tracked_request import TrackedRequest
from routebook.ledger import Ledger, ReleaseReason
from routebook.ledger.base import RouteIds
from routebook.routes.formats.hidden_layers import hidden_shape
from routebook.routes.provenance import ABSENT
from routebook.routes.schema import RouteSchema

_log = logging.getLogger(__name__)


class RowKeeper:
    """Rows of all requests of one scheduler.

    Args:
        config: options of the host.
        block_size: tokens per KV block of the group `group`.
        group: KV cache group whose blocks stand for positions, one after the other.
        prefix_caching: whether requests share KV blocks.
    """

    def __init__(
        self, config: HostConfig, *, block_size: int, group: int, prefix_caching: bool
    ) -> None:
        self._config = config
        self._group = group
        self._late = LateLedger(block_size)
        self._sharing = BlockSharing(self._late) if prefix_caching else None
        self._tracked: dict[str, TrackedRequest] = {}
        self._plans: dict[int, StepPlan] = {}

    def begin(self, request: Any) -> None:
        """A request was added, with nothing computed. One that continues a session gets no rows."""
        params = request.sampling_params
        if request.request_id in self._tracked or params is None:
            return
        wants = self._wants_rows(request.request_id, params.extra_args)
        if getattr(request, "resumable", False):
            if wants:
                _log.warning(
                    "%s gets no rows: its prompt comes in parts, and tokens of the answers in between"
                    " are taken back",
                    request.request_id,
                )
            return
        if not wants and self._sharing is None:
            return
        start = getattr(params, "routed_experts_prompt_start", None) or 0
        tracked = TrackedRequest(request, wants, next_row=start, first_row=start)
        self._tracked[request.request_id] = tracked
        name, num_prompt = request.request_id, request.num_prompt_tokens
        self._late.do(lambda ledger: ledger.begin(name, num_prompt))

    def plan(self, scheduler_output: Any) -> None:
        """A step was scheduled: note what it will compute, and tell the ledger about blocks."""
        if not scheduler_output.total_num_scheduled_tokens:
            return
        parts = block_parts(scheduler_output, self._group)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        requests = {}
        # In the order in which vLLM scheduled: later requests may share what earlier ones fill.
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            part, tracked = parts[request_id], self._tracked.get(request_id)
            if tracked is not None:
                self._follow_preemptions(tracked)
            if self._sharing is not None:
                self._sharing.take(tracked, part)
                self._sharing.publish(tracked)
            num_drafts, run = len(drafts.get(request_id, ())), tracked.run if tracked else 0
            requests[request_id] = PlannedRequest(part.start, count, num_drafts, run)
        self._plans[id(scheduler_output)] = StepPlan(scheduler_output, requests)

    def store(self, scheduler_output: Any, runner_output: Any) -> StoredStep | None:
        """The step has run: give its rows to the ledger. None if the worker has no rows of it.

        Raises:
            LedgerError: the worker ran something else than was scheduled.
        """
        plan = self._plans.pop(id(scheduler_output), None)
        message = attached(runner_output)
        if plan is None or message is None:
            return None
        ledger = self._late.open(message.schema)
        stored = plan.rows(runner_output.req_ids, runner_output.sampled_token_ids, message.ids_TLK)
        ledger.store_batch(stored.step)
        return stored

    def deliver(
        self, scheduler_output: Any, outputs: Iterable[Any], stored: StoredStep | None
    ) -> list[Any]:
        """vLLM has committed the step's tokens: put the rows that are final now into the outputs.

        Args:
            scheduler_output: of the step.
            outputs: vLLM's `EngineCoreOutput`s of the step.
            stored: what `store` returned.

        Returns:
            Outputs of requests that have had rows and cannot get the ones that follow. They must fail.
        """
        if self._sharing is not None:
            for request_id in scheduler_output.num_scheduled_tokens:
                self._sharing.publish(self._tracked.get(request_id))
        broken: list[Any] = []
        for output in outputs:
            tracked = self._tracked.get(output.request_id)
            if tracked is None or not tracked.wants_rows:
                continue
            had_rows = tracked.next_row > tracked.first_row
            output.routed_experts = self._take_rows(tracked, stored)
            if had_rows and not tracked.wants_rows:
                broken.append(output)
        return broken

    def drop(self, living: Collection[str], ids: Iterable[str] | None = None) -> None:
        """Requests left: forget those that do not live any more.

        Args:
            living: ids of the requests that vLLM's scheduler has.
            ids: which ones to look at, all if None.
        """
        for request_id in list(self._tracked if ids is None else ids):
            tracked = self._tracked.get(request_id)
            if tracked is None or request_id in living:
                continue
            del self._tracked[request_id]
            aborted = tracked.request.status.name == "FINISHED_ABORTED"
            reason = ReleaseReason.ABORTED if aborted else ReleaseReason.FINISHED
            self._late.do(_release(request_id, reason))

    def throw_away(self, request_ids: Iterable[str]) -> None:
        """vLLM will not use what steps under way compute for these requests."""
        ids = list(request_ids)
        for plan in self._plans.values():
            plan.dropped.update(ids)

    def reset(self) -> None:
        """The prefix cache was reset: nothing that was computed so far is shared any more."""
        if self._sharing is not None:
            self._sharing.reset()

    @property
    def num_steps_under_way(self) -> int:
        """Steps that were scheduled and did not come back. One can be left when the last request was aborted."""
        return len(self._plans)

    def check_integrity(self) -> None:
        """Recount; when no request lives, nothing may be held but rows of the prefix cache.

        Raises:
            IntegrityError: a leak or a contradiction.
        """
        ledger = self._late.ledger
        if ledger is None:
            return
        ledger.check_integrity()
        usage = ledger.usage()
        if usage.requests != len(self._tracked):
            raise IntegrityError(f"{usage.requests} ledger entries, {len(self._tracked)} requests")
        if not self._tracked and usage.request_chunks:
            raise IntegrityError(f"{usage.request_chunks} chunks of rows are held by no request")
        num_keys = len(self._sharing.keys) if self._sharing is not None else 0
        if usage.published > num_keys:
            raise IntegrityError(f"{usage.published} published, {num_keys} blocks have keys")

    def _wants_rows(self, request_id: str, extra_args: Mapping[str, Any] | None) -> bool:
        """A wish that cannot be understood costs one request its rows; it must not end the engine."""
        try:
            return self._config.wants_rows(extra_args)
        except RequestError as error:
            _log.warning("%s gets no rows: %s", request_id, error)
            return False

    def _follow_preemptions(self, tracked: TrackedRequest) -> None:
        while tracked.run < tracked.request.num_preemptions:
            tracked.run += 1
            self._late.do(_release(tracked.request_id, ReleaseReason.PREEMPTED))

    def _take_rows(self, tracked: TrackedRequest, stored: StoredStep | None) -> RouteIds | None:
        """Rows that follow those handed out, up to the last token but one; None if there are none."""
        start, stop = tracked.next_row, tracked.num_known_rows
        ledger = self._late.ledger
        if start >= stop:
            return None
        rows = None
        if stored is not None and not tracked.run:
            # Nearly always: what became final in this step was computed in it.
            rows = stored.rows_of(tracked.request_id, start, stop)
        if rows is None and ledger is not None:
            rows = _read(ledger, tracked.request_id, start, stop)
        if rows is None or ledger is None:
            _log.error(
                "%s gets no rows: some of its rows %d to %d were not captured, or belong to KV blocks"
                " that were not computed here",
                *(tracked.request_id, start, stop),
            )
            tracked.wants_rows = False
            return None
        tracked.next_row = stop
        return _hidden_layers(rows, ledger.schema)


def _read(ledger: Ledger, request_id: str, start: int, stop: int) -> RouteIds | None:
    """Rows of a living request, or None if one of them is absent."""
    rows = ledger.read(request_id, start, stop)
    return None if (rows.origin_T == ABSENT).any() else rows.ids_TLK


def _hidden_layers(ids_TLK: RouteIds, schema: RouteSchema) -> RouteIds:
    """The rows as vLLM returns its own: all hidden layers, dense ones as zeros."""
    if schema.num_layers == schema.num_hidden_layers:
        return ids_TLK
    ids_THK = np.zeros(hidden_shape(schema, len(ids_TLK)), schema.dtype)
    ids_THK[:, list(schema.layer_ids)] = ids_TLK
    return ids_THK


def _release(request_id: str, reason: ReleaseReason) -> Callable[[Ledger], None]:
    return lambda ledger: ledger.release(request_id, reason)
