"""An engine under watch: whatever is done to it, every completion that leaves it is compared row by row."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from routebook.engine.engine import PauseMode
from routebook.engine.executor import StepResult
from routebook.engine.outputs import CompletionOutput, RequestOutput
from routebook.engine.request import FinishReason, Request
from routebook.engine.sampling_params import SamplingParams
from routebook.engine.step import ModelRunnerOutput, SchedulerOutput
from routebook.ledger.recompute import LATEST
from routebook.routes import RoutedExperts
from tests.engine.row_check import Asked, check_forced, check_record
from tests.engine.subjects import Subject
from tests.engine.totals import Totals
from tests.engine.witness import Witness


class WatchedEngine:
    """The engine of one example, its witness, and what was asked of it.

    Args:
        subject: the model to serve.
        recount_every: how many steps and other events pass between two recounts of all that the engine holds. A
            ledger that puts work off has to do it then, so recounting always would hide faults of that.
    """

    def __init__(self, subject: Subject, recount_every: int) -> None:
        self.subject = subject
        self.totals = Totals(examples=1)
        self.engine = subject.start()
        self.witness = Witness(
            self.engine.served.num_blocks,
            subject.setting.block_size,
            takes_latest=subject.setting.recompute == LATEST,
        )
        self.spoken: list[list[int]] = []
        """Tokens of completions that ended."""
        self.partial: list[tuple[list[int], RoutedExperts]] = []
        """Tokens and record of completions that were aborted."""
        self.open: dict[str, Asked] = {}
        self.is_sound = True
        """False once something has gone wrong, after which nothing else can be expected."""
        self._recount_every, self._num_events = recount_every, 0
        self._version = self._num_resets = self._num_taken = 0
        self._epochs: deque[int] = deque()
        self._results: deque[StepResult] = deque()
        self._watch()

    @property
    def limit(self) -> int:
        """Tokens of prompt and completion at most."""
        return self.engine.max_model_len

    @property
    def is_quiet(self) -> bool:
        """Whether nothing happens by itself."""
        return self.engine.is_paused or not self.engine.has_work

    def add(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        earlier: RoutedExperts | None = None,
        forced: bool = False,
    ) -> None:
        """Queue a prompt."""
        with self._careful():
            request_id = self.engine.add_request(token_ids, params, earlier=earlier, forced=forced)
            self._recount()
        asked = Asked(token_ids=token_ids, params=params, earlier=earlier, forced=forced)
        self.open[request_id] = asked
        self.totals.continued += earlier is not None
        self.totals.forced += forced

    def step(self) -> None:
        """One step of the engine."""
        with self._careful():
            for output in self.engine.step():
                self._check(output)
            self._recount()
        self.totals.steps += 1

    def abort(self, request_id: str) -> None:
        """End a prompt whose steps may be under way."""
        with self._careful():
            output = self.engine.abort(request_id)
            # It may have ended in a pause; then its output is on its way.
            for ended in [output] if output is not None else self.engine.step():
                self._check(ended)
            assert request_id not in self.open, "a prompt was lost"
            self._recount()

    def update_weights(self, mode: PauseMode) -> None:
        """Replace the weights."""
        with self._careful():
            version = self.engine.update_weights(self.subject.weights(self._version + 1), mode)
            assert version == self._version, (
                "the version of the weights is not that of their number"
            )
            self._recount()
        self.totals.updates += 1

    def reset_prefix_cache(self) -> None:
        """Forget all shared prefixes."""
        with self._careful():
            self.engine.reset_prefix_cache()
            self._num_resets += 1
            self._recount()
        self.totals.resets += 1

    def pause(self, mode: PauseMode) -> None:
        """Stop planning."""
        with self._careful():
            self.engine.pause(mode)
            self._recount()
        self.totals.pauses += 1

    def resume(self) -> None:
        """Go on planning."""
        self.engine.resume()

    def close(self) -> None:
        """Run to the end if nothing went wrong, see that nothing is left, and stop the worker."""
        try:
            if self.is_sound:
                self.resume()
                while self.engine.has_work:
                    self.step()
                self._check_empty()
        finally:
            self.engine.shutdown()

    def _check_empty(self) -> None:
        """No request lives: blocks and rows belong to the prefix cache alone, and go with it."""
        assert not self.open, "prompts without an answer"
        scheduler = self.engine.scheduler
        assert not scheduler.requests
        assert scheduler.cache.pool.num_free == self.engine.served.num_blocks
        usage = scheduler.ledger.usage()
        assert (usage.requests, usage.request_chunks) == (0, 0)
        self.engine.reset_prefix_cache()
        self.engine.check_integrity()
        assert scheduler.ledger.usage().published == 0
        self.totals.preemptions += scheduler.num_preemptions

    def _recount(self) -> None:
        self._num_events += 1
        if self._num_events % self._recount_every == 0:
            self.engine.check_integrity()

    @contextmanager
    def _careful(self) -> Iterator[None]:
        self.is_sound = False
        yield
        self.is_sound = True

    def _watch(self) -> None:
        """Stand between engine and worker, and between worker and scheduler."""
        executor, scheduler = self.engine.executor, self.engine.scheduler
        worker = executor.worker  # type: ignore[attr-defined]
        self._submit, executor.submit = executor.submit, self._submitted  # type: ignore[method-assign]
        self._launch, worker.launch = worker.launch, self._launched
        self._commit, worker.commit_weights = worker.commit_weights, self._committed
        self._update = scheduler.update_from_output
        scheduler.update_from_output = self._taken  # type: ignore[method-assign]

    def _submitted(self, step: SchedulerOutput) -> StepResult:
        self._epochs.append(self._version + self._num_resets)
        result = self._submit(step)
        self._results.append(result)
        return result

    def _launched(self, step: SchedulerOutput) -> StepResult:
        launched: StepResult = self._launch(step)
        output = launched.result()
        self.witness.ran(step, output, epoch=self._epochs.popleft(), version=self._version)
        return launched

    def _committed(self) -> str:
        fingerprint: str = self._commit()
        self._version += 1
        return fingerprint

    def _taken(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[Request]:
        self._results.popleft()
        self._num_taken += 1
        return self._update(step, output)

    def _check(self, output: RequestOutput) -> None:
        # What the steps under way do is known only when they have run; the engine does not wait for that.
        for result in self._results:
            result.result()
        asked = self.open.pop(output.request_id)
        assert output.prompt_token_ids == tuple(asked.token_ids)
        assert [choice.index for choice in output.choices] == list(range(asked.params.n))
        for choice in output.choices:
            self._check_choice(f"{output.request_id}.{choice.index}", asked, choice)

    def _check_choice(self, request_id: str, asked: Asked, choice: CompletionOutput) -> None:
        self._check_end(asked, choice)
        totals, subject, witness = self.totals, self.subject, self.witness
        check_record(
            request_id,
            asked,
            choice,
            witness=witness,
            source=subject,
            num_taken=self._num_taken,
            totals=totals,
        )
        if asked.forced:
            check_forced(request_id, asked, witness, subject)
        totals.rows_plain += subject.check_completion(request_id, asked, choice, witness)
        totals.completions += 1
        totals.stopped += choice.finish_reason is FinishReason.STOP
        totals.aborted += choice.finish_reason is FinishReason.ABORT
        self._remember(asked, choice)

    def _check_end(self, asked: Asked, choice: CompletionOutput) -> None:
        """A completion ends with the first token that ends it, unless it was aborted before."""
        params = asked.params
        most = min(self.limit - len(asked.token_ids), params.max_tokens)
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= self.engine.served.eos_token_ids
        wanted = FinishReason.ABORT
        for number, token_id in enumerate(choice.token_ids, 1):
            assert wanted is FinishReason.ABORT, "a completion went on behind its end"
            if token_id in ends:
                wanted = FinishReason.STOP
            elif number == most:
                wanted = FinishReason.LENGTH
        assert choice.finish_reason is wanted

    def _remember(self, asked: Asked, choice: CompletionOutput) -> None:
        token_ids = [*asked.token_ids, *choice.token_ids]
        self.spoken.append(token_ids)
        record = choice.routed_experts
        if choice.finish_reason is FinishReason.ABORT and record is not None and not record.start:
            self.partial.append((token_ids, record))
