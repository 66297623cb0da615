"""Scheduler, KV cache and ledger as in the engine, over the fake worker: for tests that lead every step by the hand."""

from __future__ import annotations

from collections import deque

from routebook.engine.block_pool import BlockPool
from routebook.engine.config import EngineConfig
from routebook.engine.kv_cache_manager import KVCacheManager
from routebook.engine.outputs import CompletionOutput
from routebook.engine.record_builder import build_record
from routebook.engine.request import FinishReason, Request, RequestStatus
from routebook.engine.sampling_params import SamplingParams
from routebook.engine.scheduler import Scheduler
from routebook.engine.step import ModelRunnerOutput, SchedulerOutput
from routebook.ledger import KVSlotLedger, Ledger, RequestLedger
from routebook.routes.record import RoutedExperts
from tests.engine.row_check import Asked, TaggedRows, check_record
from tests.engine.tagged_worker import EOS, SCHEMA, VOCAB, TaggedWorker
from tests.engine.totals import Totals
from tests.engine.witness import Witness

__all__ = ["VOCAB", "TaggedRunner", "TaggedSystem"]


class TaggedRunner:
    """The fake worker, and the witness of what it runs."""

    def __init__(self, config: EngineConfig) -> None:
        self._worker = TaggedWorker(None, config)
        self.rows = TaggedRows(self._worker)
        self.shuffle = self._worker.shuffle
        self.witness = Witness(self._worker.describe().num_blocks, config.cache.block_size)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output = self._worker.execute(step)
        self.witness.ran(step, output, epoch=0, version=step.weight_version)
        return output


class TaggedSystem:
    """Everything between a request and its record, driven step by step."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        budget: int,
        max_num_seqs: int = 8,
        steps_in_flight: int = 1,
        ledger: str = "request",
    ) -> None:
        config = EngineConfig.from_options(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_steps_in_flight=steps_in_flight,
        )
        self.ledger: Ledger = RequestLedger(SCHEMA, block_size)
        if ledger == "slot":
            self.ledger = KVSlotLedger(SCHEMA, block_size, num_blocks)
        cache = KVCacheManager(BlockPool(num_blocks), block_size, self.ledger, prefix_caching=True)
        self.scheduler = Scheduler(
            config.scheduler, cache, self.ledger, eos_token_ids=frozenset({EOS})
        )
        self.runner = TaggedRunner(config)
        self.limit = num_blocks * block_size
        self.steps_in_flight = steps_in_flight
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.totals = Totals()
        self._num_requests = 0

    def add(
        self,
        prompt: list[int],
        *,
        max_tokens: int,
        rows: bool = True,
        start: int = 0,
        ignore_eos: bool = False,
    ) -> Request:
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=ignore_eos,
            routed_experts=rows,
            routed_experts_prompt_start=start,
        )
        request = Request(
            request_id=f"{self._num_requests}.0",
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            params=params,
            seed=0,
            max_num_tokens=min(self.limit, len(prompt) + max_tokens),
        )
        self._num_requests += 1
        self.scheduler.add(request)
        return request

    @property
    def rows_compared(self) -> int:
        """Rows of all records that were closed."""
        return self.totals.rows

    @property
    def rows_from_cache(self) -> int:
        """Of these, the rows of others."""
        return self.totals.rows_found

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.in_flight)

    def step(self) -> list[Request]:
        """Plan ahead, take the oldest step's results, and check every request that ended in it.

        A step runs when it is planned, as on a worker that is faster than the scheduler.
        """
        while len(self.in_flight) < self.steps_in_flight:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self.in_flight.append((plan, self.runner.execute(plan)))
        updated = self.scheduler.update_from_output(*self.in_flight.popleft())
        ended = [r for r in updated if r.status is RequestStatus.FINISHED]
        for request in ended:
            self.close(request)
        return ended

    def abort(self, request: Request) -> None:
        self.scheduler.finish(request, FinishReason.ABORT)
        self.close(request)

    def run(self) -> None:
        while self.has_work:
            self.step()

    def close(self, request: Request) -> RoutedExperts | None:
        """Make the record of a finished request, compare it, and let the request go."""
        assert request.finish_reason is not None
        record = build_record(self.ledger, request)
        self.scheduler.release(request)
        choice = CompletionOutput(
            index=0,
            text="",
            token_ids=tuple(request.output_token_ids),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=None,
            routed_experts=record,
        )
        prompt = request.token_ids[: request.num_prompt_tokens]
        check_record(
            request.request_id,
            Asked(token_ids=prompt, params=request.params),
            choice,
            witness=self.runner.witness,
            source=self.runner.rows,
            num_taken=self.runner.witness.num_forwards - len(self.in_flight),
            totals=self.totals,
        )
        return record
