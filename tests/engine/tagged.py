"""A fake model whose expert ids say who computed them, and a fake KV cache that remembers who wrote each slot.

The ids of a row are `[request, position, layer, forward]`, each in its own quarter of 65,536 experts, so a shifted,
swapped or stale row names itself. Every slot keeps `(tokens up to and including its own, row tag)`. From the slots
that a request really read, the oracle knows which computation each of its rows must come from; it never looks at the
ledger.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from routebook.capture.outputs import RoutedExpertsLists
from routebook.engine.block_pool import BlockPool
from routebook.engine.config import SchedulerConfig
from routebook.engine.kv_cache_manager import KVCacheManager
from routebook.engine.record_builder import build_record
from routebook.engine.request import FinishReason, Request, RequestStatus
from routebook.engine.sampling_params import SamplingParams
from routebook.engine.scheduler import Scheduler
from routebook.engine.step import ModelRunnerOutput, SchedulerOutput, SideOutputs
from routebook.ledger import KVSlotLedger, Ledger, RequestLedger
from routebook.routes.provenance import Origin
from routebook.routes.record import RoutedExperts
from routebook.routes.schema import RouteSchema

LAYERS = (1, 2, 4)
QUARTER = 16384
SCHEMA = RouteSchema(layer_ids=LAYERS, num_experts=4 * QUARTER, top_k=4, num_hidden_layers=6)
VOCAB = 17

Tag = tuple[int, int, int]
"""(request number, position, forward number)"""


def row_of_tag(tag: Tag) -> np.ndarray:
    """Ids `[L, 4]` of the row that this computation made."""
    request, position, forward = tag
    values = [[request, position, layer, forward % QUARTER] for layer in LAYERS]
    return (np.array(values) + np.arange(4) * QUARTER).astype(np.uint16)


def next_token(tokens: tuple[int, ...]) -> int:
    """What the fake model samples: a function of all tokens before."""
    return blake2b(bytes(tokens), digest_size=2).digest()[0] % VOCAB


@dataclass
class Held:
    """A request as the fake worker sees it."""

    tokens: list[int]
    blocks: list[int]


@dataclass
class TaggedRunner:
    """The worker: runs steps, keeps the slots, and builds the oracle."""

    num_slots: int
    block_size: int
    shuffle: random.Random
    held: dict[str, Held] = field(default_factory=dict)
    slots: dict[int, tuple[tuple[int, ...], Tag]] = field(default_factory=dict)
    expected: dict[tuple[str, int], tuple[Tag, bool]] = field(default_factory=dict)
    """(request, position) -> (tag of the row, whether another request's KV was used)."""
    forward: int = 0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in step.dropped_request_ids:
            del self.held[request_id]
        for new in step.new_requests:
            self.held[new.request_id] = Held(new.token_ids.tolist(), list(new.block_ids))
        for request_id, block_ids in step.new_block_ids.items():
            self.held[request_id].blocks += block_ids
        order = list(step.num_scheduled_tokens)
        self.shuffle.shuffle(order)
        starts = [step.num_computed_tokens[r] for r in order]
        counts = [step.num_scheduled_tokens[r] for r in order]
        # All keys and values of a step are written before any is read, as in the real attention.
        tags = [
            self._write(request_id, position)
            for request_id, start, count in zip(order, starts, counts, strict=True)
            for position in range(start, start + count)
        ]
        for request_id, start in zip(order, starts, strict=True):
            self._read(request_id, start)
        self.forward += 1
        return ModelRunnerOutput(
            request_ids=order,
            starts_R=np.array(starts),
            counts_R=np.array(counts),
            sampled_token_ids=self._sample(order, starts, counts),
            logprobs={},
            side=self._side(tags) if step.capture else SideOutputs(),
        )

    def _slot(self, request_id: str, position: int) -> int:
        block = self.held[request_id].blocks[position // self.block_size]
        slot = block * self.block_size + position % self.block_size
        assert 0 <= slot < self.num_slots
        return slot

    def _write(self, request_id: str, position: int) -> Tag:
        tag = (int(request_id), position, self.forward)
        tokens = tuple(self.held[request_id].tokens[: position + 1])
        assert len(tokens) == position + 1, "a token was scheduled that is not known"
        self.slots[self._slot(request_id, position)] = (tokens, tag)
        self.expected.setdefault((request_id, position), (tag, False))
        return tag

    def _read(self, request_id: str, start: int) -> None:
        """The context before this step must hold exactly this request's tokens."""
        for position in range(start):
            tokens, tag = self.slots[self._slot(request_id, position)]
            assert list(tokens) == self.held[request_id].tokens[: position + 1], "stale KV"
            self.expected.setdefault((request_id, position), (tag, True))

    def _sample(self, order: list[str], starts: list[int], counts: list[int]) -> dict[str, int]:
        sampled = {}
        for request_id, start, count in zip(order, starts, counts, strict=True):
            tokens = self.held[request_id].tokens
            if start + count == len(tokens):
                sampled[request_id] = next_token(tuple(tokens))
                tokens.append(sampled[request_id])
        return sampled

    def _side(self, tags: list[Tag]) -> SideOutputs:
        ids = np.stack([row_of_tag(tag) for tag in tags])
        return SideOutputs(routed_experts=RoutedExpertsLists(ids))


class TaggedSystem:
    """Scheduler, KV cache and ledger as in the engine, over the fake worker."""

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
        self.ledger: Ledger = RequestLedger(SCHEMA, block_size)
        if ledger == "slot":
            self.ledger = KVSlotLedger(SCHEMA, block_size, num_blocks)
        cache = KVCacheManager(BlockPool(num_blocks), block_size, self.ledger, prefix_caching=True)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                max_steps_in_flight=steps_in_flight,
            ),
            cache,
            self.ledger,
            eos_token_ids=frozenset({0}),
        )
        self.runner = TaggedRunner(num_blocks * block_size, block_size, random.Random(0))
        self.limit = num_blocks * block_size
        self.steps_in_flight = steps_in_flight
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.num_requests = 0
        self.rows_compared = 0
        self.rows_from_cache = 0

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
            ignore_eos=ignore_eos,
            routed_experts=rows,
            routed_experts_prompt_start=start,
        )
        request = Request(
            request_id=str(self.num_requests),
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            params=params,
            seed=0,
            max_num_tokens=min(self.limit, len(prompt) + max_tokens),
        )
        self.num_requests += 1
        self.scheduler.add(request)
        return request

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
        record = build_record(self.ledger, request)
        self.scheduler.release(request)
        if record is not None:
            self.check(request, record)
        return record

    def check(self, request: Request, record: RoutedExperts) -> None:
        """Every computed position has the row of the computation that the oracle saw; the others have none."""
        record.check_tokens(request.token_ids)
        origins = {
            p: span.origin for span in record.provenance for p in range(span.start, span.stop)
        }
        for position in range(record.start, record.stop):
            seen = self.runner.expected.get((request.request_id, position))
            if seen is not None and seen[0][2] >= self.runner.forward - len(self.in_flight):
                seen = None  # computed by a step whose results are still under way
            assert bool(record.valid_T[position - record.start]) == (seen is not None)
            if seen is None:
                continue
            tag, cached = seen
            np.testing.assert_array_equal(record.ids_TLK[position - record.start], row_of_tag(tag))
            own = Origin.PREFILL if position < request.num_prompt_tokens else Origin.DECODE
            assert origins[position] is (Origin.PREFIX_CACHE if cached else own)
            self.rows_compared += 1
            self.rows_from_cache += cached
