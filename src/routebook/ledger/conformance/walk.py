"""Drives a ledger the way a scheduler does, with its oracle beside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from routebook.ledger.base import Ledger, ReleaseReason
from routebook.ledger.conformance.pair import LedgerPair, PlannedStep


@dataclass(slots=True)
class _Walker:
    family: int
    prompt: int
    known: int
    """Tokens that are known: the prompt, and one more for each position computed for the first time."""
    computed: int = 0
    """Positions whose KV exists in the current run."""
    waiting: bool = True


class SchedulerWalk:
    """A small scheduler: prefix cache, preemption, steps in flight. Each verb keeps the ledger's contract.

    The KV pool must hold all living requests at their longest; it evicts published blocks beyond that. Requests of
    one family have the same first `common` tokens, hence the same block hashes there.
    """

    def __init__(self, ledger: Ledger, *, common: int, longest: int, num_blocks: int) -> None:
        self.pair = LedgerPair(ledger, num_blocks)
        self.version = 0
        self.walkers: dict[str, _Walker] = {}
        self.in_flight: deque[PlannedStep] = deque()
        self._common = common
        self._longest = longest
        self._count = 0

    def add(self, family: int, prompt: int) -> str:
        """Begin a request, which waits for its first step."""
        request_id = f"request-{self._count}"
        self._count += 1
        self.walkers[request_id] = _Walker(family, prompt, prompt)
        self.pair.begin(request_id, prompt)
        return request_id

    def schedule(self, wanted: Sequence[tuple[str, int]], max_hits: int) -> None:
        """Plan a step of up to so many tokens of each request; admitted ones take up to `max_hits` blocks."""
        pieces = []
        for request_id, count in wanted:
            walker = self.walkers[request_id]
            if walker.waiting:
                self._admit(request_id, walker, max_hits)
            stop = min(walker.computed + count, walker.known, self._longest)
            if stop > walker.computed:
                pieces.append((request_id, walker.computed, stop - walker.computed))
                self._compute(request_id, walker, stop)
        self.in_flight.append(self.pair.plan(*pieces, version=self.version))

    def decode(self, steps: int, depth: int) -> None:
        """Plan steps of one token of each request that runs, and store all but the last `depth`."""
        for _ in range(steps):
            running = [name for name, walker in self.walkers.items() if not walker.waiting]
            self.schedule([(name, 1) for name in running], 0)
            while len(self.in_flight) > depth:
                self.store_oldest(tell_runs=depth > 0)

    def store_oldest(self, *, tell_runs: bool = True) -> None:
        """Store the oldest step in flight."""
        self.pair.store(self.in_flight.popleft(), tell_runs=tell_runs)

    def preempt(self, request_id: str) -> None:
        """Take a request's KV blocks; it waits."""
        self.pair.release(request_id, ReleaseReason.PREEMPTED)
        walker = self.walkers[request_id]
        walker.waiting, walker.computed = True, 0

    def end(self, request_id: str, reason: ReleaseReason) -> None:
        """Finish or abort a request."""
        self.pair.release(request_id, reason)
        del self.walkers[request_id]

    def evict(self, which: int) -> None:
        """Evict one published block, if there is any."""
        hashes = sorted(self.pair.oracle.published)
        if hashes:
            self.pair.withdraw(hashes[which % len(hashes)], b"never published")

    def update_weights(self) -> None:
        """Reset the prefix cache and raise the version."""
        self.pair.reset()
        self.version += 1

    def check(self) -> None:
        """Compare everything with the oracle, one block beyond the longest request."""
        self.pair.compare(self._longest + self.pair.ledger.block_size + 1)

    def drain(self) -> None:
        """Store what is in flight, end every request, and look that nothing is left."""
        while self.in_flight:
            self.store_oldest()
        self.check()
        for request_id in list(self.walkers):
            self.end(request_id, ReleaseReason.FINISHED)
        usage = self.pair.ledger.usage()
        assert (usage.requests, usage.request_chunks) == (0, 0), usage
        self.check()
        self.pair.reset()
        assert self.pair.ledger.usage().published == 0
        self.check()

    def _hash(self, request_id: str, walker: _Walker, block: int) -> bytes:
        end = (block + 1) * self.pair.ledger.block_size
        shared = end <= min(self._common, walker.prompt)
        # Hashes of one version only: a reset makes the cache forget, it does not change a token.
        owner = f"family-{walker.family}" if shared else request_id
        return f"{owner}/{block}".encode()

    def _admit(self, request_id: str, walker: _Walker, max_hits: int) -> None:
        size = self.pair.ledger.block_size
        # The last known token is always computed: its logits are wanted.
        most = min((walker.known - 1) // size, max_hits)
        hashes = [self._hash(request_id, walker, block) for block in range(most)]
        hits = self.pair.ledger.available(hashes)
        assert hits == self.pair.oracle.available(hashes), (request_id, hits)
        self.pair.share(request_id, hashes[:hits])
        walker.computed, walker.waiting = hits * size, False

    def _compute(self, request_id: str, walker: _Walker, stop: int) -> None:
        size = self.pair.ledger.block_size
        for block in range(walker.computed // size, stop // size):
            self.pair.publish(request_id, block, self._hash(request_id, walker, block))
        walker.computed = stop
        if stop == walker.known:
            walker.known += 1
