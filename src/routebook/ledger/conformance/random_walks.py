"""Long random schedules."""

# The names of the tests are their sentences.
# ruff: noqa: D102

from __future__ import annotations

import random

from routebook.ledger.base import ReleaseReason
from routebook.ledger.conformance.case import ConformanceCase
from routebook.ledger.conformance.pair import TAG_SCHEMA
from routebook.ledger.conformance.walk import SchedulerWalk

LONGEST = 44
MOST_REQUESTS = 6
ENDS = (ReleaseReason.FINISHED, ReleaseReason.ABORTED)


class RandomWalkConformance(ConformanceCase):
    """Long random schedules."""

    def test_random_walks_agree_with_the_oracle(self) -> None:
        for seed in range(24):
            rng = random.Random(seed)
            block_size = rng.choice((1, 4, 16))
            num_blocks = MOST_REQUESTS * -(-LONGEST // block_size) + rng.randrange(9)
            ledger = self.make_ledger(TAG_SCHEMA, block_size, num_blocks)
            walk = SchedulerWalk(ledger, common=20, longest=LONGEST, num_blocks=num_blocks)
            depth = seed % 4
            for _ in range(60):
                random_move(walk, rng, depth)
                # A look may change what a ledger has written already.
                if seed % 3 or rng.random() < 0.1:
                    walk.check()
            walk.drain()


def random_move(walk: SchedulerWalk, rng: random.Random, depth: int) -> None:
    """One verb of a scheduler that keeps up to `depth` steps in flight beside the one it plans."""
    living = sorted(walk.walkers)
    move = rng.random()
    if not living or (move < 0.12 and len(living) < MOST_REQUESTS):
        walk.add(rng.randrange(2), rng.randint(1, 30))
    elif move < 0.3:
        walk.decode(rng.randint(1, 9), depth)
    elif move < 0.75:
        batch = rng.sample(living, rng.randint(1, len(living)))
        hits = rng.choice((0, 2, 99, 99))
        walk.schedule([(name, rng.choice((1, 1, 3, 9, 40))) for name in batch], hits)
        while len(walk.in_flight) > depth:
            walk.store_oldest(tell_runs=depth > 0)
    elif move < 0.87:
        walk.preempt(rng.choice(living))
    elif move < 0.93:
        walk.end(rng.choice(living), rng.choice(ENDS))
    elif move < 0.98:
        walk.evict(rng.randrange(99))
    else:
        walk.update_weights()
