"""Any schedule that keeps the ledger's contract reads as the oracle says, from either ledger.

In half of the examples after every move; in the others only now and then, since a look may make a ledger write what
it has only taken over.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from routebook.ledger import (
    KVSlotConfig,
    KVSlotLedger,
    Ledger,
    LedgerConfig,
    ReleaseReason,
    RequestLedger,
)
from routebook.ledger.conformance.pair import TAG_SCHEMA
from routebook.ledger.conformance.walk import SchedulerWalk
from routebook.ledger.recompute import RECOMPUTE

COUNTS = st.sampled_from((1, 1, 2, 3, 5, 16, 40))
MOST_REQUESTS = 5
LONGEST = 40


class ScheduleMachine(RuleBasedStateMachine):
    """Moves of a scheduler; `depth` steps may be in flight beside the one it plans.

    The KV pool has room for the requests and little more, so blocks change hands all the time.
    """

    def make_ledger(self, block_size: int, num_blocks: int, small: bool, recompute: str) -> Ledger:
        raise NotImplementedError

    @initialize(
        block_size=st.sampled_from((1, 4, 16)),
        depth=st.integers(0, 3),
        small=st.booleans(),
        spare_blocks=st.integers(0, 8),
        always_look=st.booleans(),
        recompute=st.sampled_from(RECOMPUTE),
    )
    def start(
        self,
        *,
        block_size: int,
        depth: int,
        small: bool,
        spare_blocks: int,
        always_look: bool,
        recompute: str,
    ) -> None:
        num_blocks = MOST_REQUESTS * -(-LONGEST // block_size) + spare_blocks
        ledger = self.make_ledger(block_size, num_blocks, small, recompute)
        self.depth = depth
        self.always_look = always_look
        self.walk = SchedulerWalk(ledger, common=18, longest=LONGEST, num_blocks=num_blocks)

    def living(self) -> list[str]:
        return sorted(self.walk.walkers)

    def moved(self) -> None:
        if self.always_look:
            self.walk.check()

    @precondition(lambda self: not self.always_look)
    @rule()
    def look(self) -> None:
        self.walk.check()

    @precondition(lambda self: self.walk.walkers)
    @rule(steps=st.sampled_from((1, 2, 3, 9)))
    def decode(self, steps: int) -> None:
        self.walk.decode(steps, self.depth)
        self.moved()

    @precondition(lambda self: len(self.walk.walkers) < MOST_REQUESTS)
    @rule(family=st.integers(0, 1), prompt=st.integers(1, 24))
    def begin(self, family: int, prompt: int) -> None:
        self.walk.add(family, prompt)
        self.moved()

    @precondition(lambda self: self.walk.walkers)
    @rule(data=st.data(), max_hits=st.sampled_from((0, 1, 99)))
    def step(self, data: st.DataObject, max_hits: int) -> None:
        batch = data.draw(st.lists(st.sampled_from(self.living()), min_size=1, unique=True))
        self.walk.schedule([(name, data.draw(COUNTS)) for name in batch], max_hits)
        while len(self.walk.in_flight) > self.depth:
            self.walk.store_oldest(tell_runs=self.depth > 0)
        self.moved()

    @precondition(lambda self: self.walk.in_flight)
    @rule()
    def output_arrives(self) -> None:
        self.walk.store_oldest()
        self.moved()

    @precondition(lambda self: self.walk.walkers)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.walk.preempt(data.draw(st.sampled_from(self.living())))
        self.moved()

    @precondition(lambda self: self.walk.walkers)
    @rule(data=st.data(), reason=st.sampled_from((ReleaseReason.FINISHED, ReleaseReason.ABORTED)))
    def end(self, data: st.DataObject, reason: ReleaseReason) -> None:
        self.walk.end(data.draw(st.sampled_from(self.living())), reason)
        self.moved()

    @rule(which=st.integers(0, 20))
    def evict(self, which: int) -> None:
        self.walk.evict(which)
        self.moved()

    @rule()
    def update_weights(self) -> None:
        self.walk.update_weights()
        self.moved()

    def teardown(self) -> None:
        if hasattr(self, "walk"):
            self.walk.drain()


class RequestLedgerMachine(ScheduleMachine):
    def make_ledger(self, block_size: int, num_blocks: int, small: bool, recompute: str) -> Ledger:
        rows = 1 if small else 4096
        config = LedgerConfig(initial_rows=rows, growth_factor=1.5, recompute=recompute)
        return RequestLedger(TAG_SCHEMA, block_size, config)


class KVSlotLedgerMachine(ScheduleMachine):
    def make_ledger(self, block_size: int, num_blocks: int, small: bool, recompute: str) -> Ledger:
        config = KVSlotConfig(initial_requests=1 if small else 64, recompute=recompute)
        return KVSlotLedger(TAG_SCHEMA, block_size, num_blocks, config)


SETTINGS = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
RequestLedgerMachine.TestCase.settings = SETTINGS
KVSlotLedgerMachine.TestCase.settings = SETTINGS
TestRequestLedgerSchedules = RequestLedgerMachine.TestCase
TestKVSlotLedgerSchedules = KVSlotLedgerMachine.TestCase
