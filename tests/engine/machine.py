"""The state machine: any order of all that can happen to an engine.

An example is one engine with a KV pool that is too small, so that requests lose their blocks by themselves. It is
told to do whatever comes, and at the end to finish. :class:`WatchedEngine` compares what comes out.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from routebook.engine.config import LEDGERS
from routebook.engine.engine import PauseMode
from routebook.engine.sampling_params import SamplingParams
from routebook.ledger.recompute import RECOMPUTE
from tests.engine.subjects import EXECUTORS, Setting, Subject, TaggedSubject, TinySubject
from tests.engine.totals import Totals
from tests.engine.watched_engine import WatchedEngine

_POOL_UNIT = 16
"""Every block size divides it."""
_NUM_PREFIXES = 3
_MODES = (PauseMode.KEEP, PauseMode.ABORT, PauseMode.WAIT, PauseMode.KEEP)
"""`KEEP` twice: it is the one that leaves something to get wrong."""
_ROWS = ((True, 0), (True, 0), (True, 2), (True, 9), (False, 0))
"""Whether a request wants its rows, and from which position on."""
_STOP_STRIDE = 17
_STEPS = st.integers(1, 8)
"""Steps before something interferes: nothing grows where all is cut at once."""


class EngineMachine(RuleBasedStateMachine):
    """Rules over one engine; subclasses name the model, and how long an example may get."""

    subject: ClassVar[type[Subject]]
    ledgers: ClassVar[tuple[str, ...]] = LEDGERS
    depths: ClassVar[tuple[int, ...]] = (1, 2, 3)
    """Numbers of steps in flight to choose from."""
    most_units: ClassVar[int]
    """KV pool at most, in units of 16 tokens."""
    most_tokens: ClassVar[int]
    """Tokens to generate at most."""
    most_completions: ClassVar[int]
    most_rules: ClassVar[int]
    """Rules of one example."""
    totals: ClassVar[Totals]
    """Counts all examples of the class."""

    watched: WatchedEngine

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        block_size = data.draw(st.sampled_from((1, 4, 16)), "block_size")
        units = data.draw(st.integers(1, self.most_units), "pool")
        setting = Setting(
            block_size=block_size,
            num_blocks=units * _POOL_UNIT // block_size,
            max_num_batched_tokens=data.draw(st.sampled_from((24, 5, 1)), "budget"),
            max_num_seqs=data.draw(st.sampled_from((2, 4, 8)), "max_num_seqs"),
            max_steps_in_flight=data.draw(st.sampled_from(self.depths), "steps in flight"),
            ledger=data.draw(st.sampled_from(self.ledgers), "ledger"),
            recompute=data.draw(st.sampled_from(RECOMPUTE), "recompute"),
            executor=data.draw(st.sampled_from(EXECUTORS), "executor"),
            dtype=data.draw(st.sampled_from(self.subject.dtypes), "dtype"),
        )
        note(repr(setting))
        recount_every = data.draw(st.sampled_from((1, 7)), "recount every")
        self.watched = WatchedEngine(self.subject(setting), recount_every)
        self.add(0, data.draw(st.integers(0, 30), "length"), [], data)

    @rule(
        kind=st.integers(0, _NUM_PREFIXES - 1),
        length=st.integers(0, 30),
        tail=st.lists(st.integers(1, 3), max_size=2),
        params=st.data(),
    )
    def add(self, kind: int, length: int, tail: list[int], params: st.DataObject) -> None:
        """A new prompt: one of a few prefixes, and perhaps something of its own.

        Two of them fit into the pool, so that they starve each other only when they have got somewhere.
        """
        vocabulary, length = self.subject.vocabulary, min(length, self.watched.limit // 2 - 2)
        prefix = [vocabulary[(7 * i + 5 * kind) % len(vocabulary)] for i in range(length)]
        self._add([*prefix, *(vocabulary[t] for t in tail)], params)

    @rule(which=st.integers(0, 7), cut=st.integers(0, 5), params=st.data())
    def ask_again(self, which: int, cut: int, params: st.DataObject) -> None:
        """A prompt that begins as one that was answered, and with its answer."""
        if spoken := self.watched.spoken:
            token_ids = spoken[-1 - which % len(spoken)]
            self._add(token_ids[: max(1, len(token_ids) - cut)], params)

    @rule(
        which=st.integers(0, 7),
        more=st.integers(-1, 2),
        forced=st.booleans(),
        max_tokens=st.integers(1, 12),
    )
    def go_on(self, which: int, more: int, forced: bool, max_tokens: int) -> None:
        """Continue what was aborted: from its last token, without it, or behind something new."""
        if not self.watched.partial:
            self.abort(max_tokens // 2, which)
        partial = [p for p in self.watched.partial if len(p[0]) + more < self.watched.limit]
        if partial:
            token_ids, record = partial[-1 - which % len(partial)]
            token_ids = token_ids[: record.stop] if more < 0 else [*token_ids, *[5] * more]
            params = self._params(max_tokens, n=1 + (max_tokens == 1))
            self.watched.add(token_ids or [5], params, earlier=record, forced=forced)

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.watched.step()
            if self.watched.is_quiet:
                break

    @rule(steps=_STEPS, which=st.integers(0, 7))
    def abort(self, steps: int, which: int) -> None:
        self.step(steps)
        if self.watched.open:
            open_ids = list(self.watched.open)
            self.watched.abort(open_ids[which % len(open_ids)])

    @rule(steps=_STEPS, mode=st.sampled_from(_MODES))
    def update_weights(self, steps: int, mode: PauseMode) -> None:
        self.step(steps)
        self.watched.update_weights(mode)

    @rule(steps=_STEPS)
    def reset_prefix_cache(self, steps: int) -> None:
        self.step(steps)
        # Too often, and nothing would be left to share.
        if self.watched.totals.resets <= self.watched.totals.updates:
            self.watched.reset_prefix_cache()

    @rule(steps=_STEPS, mode=st.sampled_from(_MODES))
    def pause_or_resume(self, steps: int, mode: PauseMode) -> None:
        self.step(steps)
        if self.watched.engine.is_paused:
            self.watched.resume()
        else:
            self.watched.pause(mode)

    def teardown(self) -> None:
        if hasattr(self, "watched"):
            self.watched.close()
            self.totals.add(self.watched.totals)

    def _add(self, token_ids: list[int], drawn: st.DataObject) -> None:
        token_ids = token_ids[: self.watched.limit - 1] or [self.subject.vocabulary[0]]
        rows, start = drawn.draw(st.sampled_from(_ROWS), "rows, from")
        params = self._params(
            drawn.draw(st.integers(1, self.most_tokens), "max_tokens"),
            n=drawn.draw(st.integers(1, self.most_completions), "n"),
            stop_token_ids=tuple(
                token_id
                for number in drawn.draw(st.lists(st.integers(1, 16), max_size=1), "stop")
                for token_id in self.subject.stop_tokens[number::_STOP_STRIDE]
            ),
            ignore_eos=drawn.draw(st.booleans(), "ignore_eos"),
            routed_experts=rows,
            routed_experts_prompt_start=min(start, len(token_ids)),
        )
        self.watched.add(token_ids, params)

    def _params(self, max_tokens: int, **more: Any) -> SamplingParams:
        # Few seeds: the same prompt often goes on in the same way, so that generated blocks are shared too.
        seed = len(self.watched.open) % 2
        return SamplingParams(
            max_tokens=max_tokens, seed=seed, temperature=self.subject.temperature, **more
        )


class TaggedMachine(EngineMachine):
    """Over the fake whose rows name their maker."""

    subject = TaggedSubject
    most_units = 4
    most_tokens = 16
    most_completions = 3
    most_rules = 25


class TinyMachine(EngineMachine):
    """Over the bundled model in reference mode, which takes milliseconds per token."""

    subject = TinySubject
    most_units = 2
    most_tokens = 12
    most_completions = 3
    most_rules = 14


def run_machine(
    machine: type[EngineMachine],
    num_examples: int,
    totals: Totals,
    *,
    with_seed: int | None = None,
    shrink: bool = True,
    **limits: tuple[Any, ...],
) -> None:
    """Run examples of a machine until one fails, which is then made small and raised.

    Args:
        machine: over which model.
        num_examples: how many.
        totals: counts what they did.
        with_seed: draws these examples, whatever the profile says; by default the profile decides.
        shrink: whether to make a failing example small.
        limits: class attributes of the machine to narrow, `ledgers` or `depths`.
    """
    name = "".join([machine.__name__, *(str(value) for each in limits.values() for value in each)])
    limited = type(name, (machine,), {"totals": totals, **limits})
    options = settings(
        max_examples=num_examples,
        stateful_step_count=machine.most_rules,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.reuse, Phase.generate, *([Phase.shrink] if shrink else [])],
        report_multiple_bugs=False,
    )
    if with_seed is not None:
        limited = seed(with_seed)(limited)
        options = settings(options, derandomize=False, database=None)
    run_state_machine_as_test(limited, settings=options)
