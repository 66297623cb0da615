"""A witness of all steps that an engine runs: what each request computed, and what it found in its blocks.

It knows the plans that the worker was given, and the tokens that the worker sampled; it has never heard of a ledger,
a hash or a row. Every slot of the KV pool remembers who wrote it last::

    digest     of the tokens up to and including its own
    maker      the request, and the forward in which it computed the slot
    epoch      of the prefix cache, if the slot and all of its context were computed freely within it; else none
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from routebook.engine.step import ModelRunnerOutput, NewRequestData, SchedulerOutput

_MIXED = -1
"""Epoch of a slot whose context was computed in several, or along forced routes."""


@dataclass(slots=True)
class Run:
    """One life of a request in the KV pool, from its admission to its preemption or end."""

    num_hits: int
    """Leading positions whose keys and values were there already."""
    makers: list[str] = field(default_factory=list)
    """By position: who computed it."""
    forwards: list[int] = field(default_factory=list)
    """By position: in which forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """The computation whose row a request must have at a position."""

    maker: str
    position: int
    forward: int
    is_own: bool
    """Whether the request computed it itself, rather than found it."""
    is_recomputed: bool = False
    """Whether it is preferred to one of an earlier run."""


@dataclass(slots=True)
class _Held:
    """A request that has blocks."""

    run: Run
    forced: bool
    token_ids: list[int]
    digests: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def add_tokens(self, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        for token_id in token_ids:
            self.digests.append(hash((self.digests[-1] if self.digests else 0, token_id)))


class Witness:
    """Follows the plans of one engine; `ran` is called for each, in the order in which they run.

    Args:
        num_blocks: blocks of the KV pool.
        block_size: tokens per block.
        takes_latest: whether a request has the row of the latest run that has one, instead of the earliest.
    """

    def __init__(self, num_blocks: int, block_size: int, *, takes_latest: bool = False) -> None:
        self._takes_latest = takes_latest
        self._block_size = block_size
        num_slots = num_blocks * block_size
        self._digests = [0] * num_slots
        self._makers = [""] * num_slots
        self._forwards = [-1] * num_slots
        self._epochs = [_MIXED] * num_slots
        self._held: dict[str, _Held] = {}
        self._runs: dict[str, list[Run]] = {}
        self._captured: list[bool] = []
        self.seeds: dict[str, int] = {}
        """Of the requests that ran: the seed that the worker was told."""
        self.versions: list[int] = []
        """By forward: the version of the weights that ran it."""

    @property
    def num_forwards(self) -> int:
        """Steps that ran."""
        return len(self.versions)

    def ran(
        self, step: SchedulerOutput, output: ModelRunnerOutput, *, epoch: int, version: int
    ) -> None:
        """Take down a step.

        Args:
            step: the plan.
            output: what the worker gave back; only the sampled tokens are looked at.
            epoch: how often shared prefixes had been forgotten when the step was planned.
            version: how often the weights had been replaced when it ran.
        """
        for request_id in step.dropped_request_ids:
            del self._held[request_id]
        for new in step.new_requests:
            self._admit(new, step.num_computed_tokens[new.request_id])
        for request_id, block_ids in step.new_block_ids.items():
            self._add_blocks(self._held[request_id], block_ids)
        for request_id, count in step.num_scheduled_tokens.items():
            self._write(request_id, step.num_computed_tokens[request_id], count)
        # In the order of the plan, in which a request comes after those whose blocks it shares.
        for request_id, count in step.num_scheduled_tokens.items():
            self._read(request_id, step.num_computed_tokens[request_id], count, epoch)
        for request_id, token_id in output.sampled_token_ids.items():
            self._held[request_id].add_tokens([token_id])
        self.versions.append(version)
        self._captured.append(step.capture)

    def computations(
        self, request_id: str, start: int, stop: int, num_taken: int
    ) -> Iterator[Computation | None]:
        """For each position the computation whose row the request must have, or None.

        Args:
            request_id: the request.
            start: first position.
            stop: behind the last one.
            num_taken: how many forwards have been given to the scheduler.
        """
        runs = self._runs.get(request_id, ())
        for position in range(start, stop):
            found = [
                run
                for run in runs
                if position < len(run.forwards)
                and run.forwards[position] < num_taken
                and self._captured[run.forwards[position]]
            ]
            if not found:
                yield None
                continue
            run = found[-1 if self._takes_latest else 0]
            is_own = position >= run.num_hits
            yield Computation(
                maker=run.makers[position],
                position=position,
                forward=run.forwards[position],
                is_own=is_own,
                is_recomputed=is_own and run is not found[0],
            )

    def runs(self, request_id: str) -> list[Run]:
        """All runs of a request, first one first."""
        return self._runs.get(request_id, [])

    def _admit(self, new: NewRequestData, num_hits: int) -> None:
        run = Run(num_hits)
        self._runs.setdefault(new.request_id, []).append(run)
        assert new.request_id not in self._held, "a request that the worker holds came as new"
        held = self._held[new.request_id] = _Held(run, new.forced is not None, [])
        held.add_tokens(new.token_ids.tolist())
        self._add_blocks(held, new.block_ids)
        self.seeds[new.request_id] = new.seed

    def _add_blocks(self, held: _Held, block_ids: list[int]) -> None:
        size = self._block_size
        for block_id in block_ids:
            held.slots += range(block_id * size, (block_id + 1) * size)

    def _write(self, request_id: str, start: int, count: int) -> None:
        held, forward = self._held[request_id], self.num_forwards
        assert start + count <= len(held.token_ids), "a token was scheduled that is not known"
        for position in range(start, start + count):
            slot = held.slots[position]
            self._digests[slot] = held.digests[position]
            self._makers[slot] = request_id
            self._forwards[slot] = forward

    def _read(self, request_id: str, start: int, count: int, epoch: int) -> None:
        """The context must be what the request found when it was admitted, and what it computed since."""
        held, stop = self._held[request_id], start + count
        run = held.run
        slots = held.slots[:stop]
        assert [self._digests[slot] for slot in slots] == held.digests[:stop], "stale KV"
        if not run.forwards:
            self._share(held, start, epoch)
        assert len(run.forwards) == start, "a run left out a position, or computed one twice"
        run.makers += [request_id] * count
        run.forwards += [self.num_forwards] * count
        assert [self._makers[slot] for slot in slots] == run.makers, "KV has two owners"
        assert [self._forwards[slot] for slot in slots] == run.forwards, "KV was computed again"
        pure = not held.forced and (start == 0 or self._epochs[slots[start - 1]] == epoch)
        for slot in slots[start:]:
            self._epochs[slot] = epoch if pure else _MIXED

    def _share(self, held: _Held, num_hits: int, epoch: int) -> None:
        slots = held.slots[:num_hits]
        assert num_hits == held.run.num_hits
        assert not (held.forced and num_hits), "forced routes over shared keys and values"
        assert all(self._epochs[slot] == epoch for slot in slots), "a forgotten prefix was found"
        held.run.makers += [self._makers[slot] for slot in slots]
        held.run.forwards += [self._forwards[slot] for slot in slots]
