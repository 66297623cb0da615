"""The engine: takes requests, runs steps, hands out completions with their rows.

It owns one scheduler and one worker and moves data between them; each of them could sit in another process.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any

from routebook.engine.config import EngineConfig
from routebook.engine.detokenizer import Detokenizer
from routebook.engine.executor import Executor, StepResult
from routebook.engine.executor_choice import make_executor
from routebook.engine.increments import Increment
from routebook.engine.interrupts import interrupts_held
from routebook.engine.model_loader import load_tokenizer
from routebook.engine.open_prompts import OpenPrompt
from routebook.engine.outputs import RequestOutput
from routebook.engine.request import FinishReason, Request, RequestStatus
from routebook.engine.request_checks import check_continuation, check_request, check_streaming
from routebook.engine.sampling_params import SamplingParams
from routebook.engine.scheduler_factory import make_scheduler
from routebook.engine.served_model import ServedModel
from routebook.engine.step import SchedulerOutput
from routebook.engine.weights import Weights
from routebook.errors import IntegrityError, RequestError, WorkerError
from routebook.routes import RoutedExperts, RouteSchema


class PauseMode(Enum):
    """What becomes of open requests when the engine pauses."""

    WAIT = "wait"
    ABORT = "abort"
    KEEP = "keep"


class Engine:
    """Continuous batching over one model, with the routed experts of every token.

    Args:
        model: a folder, a hub id, a bundled name, or a transformers model.
        config: options of the components.
        tokenizer: overrides the model's own.

    Raises:
        ModelError: the model cannot be used; the message says why.
        ConfigError: the options do not fit the model or each other.
    """

    def __init__(
        self, model: str | Any, config: EngineConfig, tokenizer: Any | None = None
    ) -> None:
        self.config = config
        self.executor: Executor = make_executor(model, config)
        self.served: ServedModel = self.executor.start()
        try:
            self.tokenizer = tokenizer or load_tokenizer(model)
        except BaseException:
            self.executor.shutdown()
            raise
        self.scheduler = make_scheduler(self.config, self.served)
        self._in_flight: deque[tuple[SchedulerOutput, StepResult]] = deque()
        self._random = random.Random(config.scheduler.base_seed)
        self._open: dict[str, OpenPrompt] = {}
        self._unread: dict[str, OpenPrompt] = {}
        self._num_requests = 0
        self._ended: list[RequestOutput] = []
        self.is_paused = False
        self._failure: WorkerError | None = None
        self._is_changing = False

    @property
    def schema(self) -> RouteSchema:
        """Layers, experts and top-k of the model."""
        return self.served.schema

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and completion at most."""
        return self.served.max_model_len

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, a step is under way, or an output waits to be taken."""
        return self.scheduler.has_work or bool(self._in_flight or self._ended)

    @property
    def has_failed(self) -> bool:
        """Whether the worker has failed or was shut down, so that only `restart` helps."""
        return self._failure is not None

    @property
    def can_advance(self) -> bool:
        """Whether a call of `step` would do anything: while the engine is paused, what waits stays where it is."""
        return bool(self._in_flight or self._ended) or (
            self.scheduler.has_work and not self.is_paused
        )

    def tokenize(self, prompt: str) -> list[int]:
        """Token ids of a text, as the model's tokenizer makes them.

        Raises:
            RequestError: the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise RequestError("the model has no tokenizer; give token ids instead of a text")
        token_ids: list[int] = self.tokenizer.encode(prompt)
        return token_ids

    def check_request(self, token_ids: list[int], params: SamplingParams) -> None:
        """Refuse what cannot be served, before anything is queued; see :func:`check_request`.

        Raises:
            RequestError: an empty or too long prompt, a token id outside the vocabulary, a start beyond the prompt.
        """
        check_request(self.served, token_ids, params, self.tokenizer is not None)

    def check_continuation(
        self, token_ids: list[int], params: SamplingParams, earlier: RoutedExperts, forced: bool
    ) -> None:
        """Refuse to continue what does not belong together; see :func:`check_continuation`.

        Raises:
            RecordError: the record is of another model or other tokens.
            RequestError: the parameters leave out rows that the record has.
            UncapturableError: on this model no route can be forced.
        """
        check_continuation(self.served, token_ids, params, earlier, forced)

    def add_request(
        self,
        token_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
        *,
        earlier: RoutedExperts | None = None,
        forced: bool = False,
        streamed: bool = False,
        cache_salt: str = "",
    ) -> str:
        """Queue a prompt; returns the id under which its output will come.

        Args:
            token_ids: the prompt; of a continued completion, all its tokens so far.
            params: how to generate.
            prompt: its text, for the output.
            earlier: record of an aborted run over the first of these tokens. Its rows are kept as they are, and those
                of later positions follow.
            forced: route the tokens that `earlier` has rows for along these rows again, so that keys and values agree
                with the record. Their blocks are not shared with other requests.
            cache_salt: share its prefix only with prompts of the same salt.
            streamed: hand it out with :meth:`take_increments` instead of returning its output from `step`.

        Raises:
            RequestError: see :meth:`check_request`; nothing was queued.
            RecordError: see :meth:`check_continuation`; nothing was queued.
            WorkerError: the worker has failed or was shut down; call `restart`.
        """
        self._refuse_if_failed()
        self.check_request(token_ids, params)
        if earlier is not None:
            self.check_continuation(token_ids, params, earlier, forced)
        elif forced:
            raise RequestError("forced=True needs a record to force")
        if streamed:
            check_streaming(params, self.config.cache.recompute)
        base_seed = self._random.getrandbits(62) if params.seed is None else params.seed
        opened = OpenPrompt(
            request_id=str(self._num_requests),
            prompt=prompt,
            prompt_token_ids=tuple(token_ids),
            params=params,
            seed=base_seed,
            detokenizers=self._make_detokenizers(params, streamed),
            streamed=streamed,
        )
        with interrupts_held():
            self._num_requests += 1
            self._open[opened.request_id] = opened
            for index in range(params.n):
                self._add_child(opened, index, earlier, forced, cache_salt)
        return opened.request_id

    def step(self) -> list[RequestOutput]:
        """Plan ahead as far as allowed, and take the results of the oldest step under way.

        Returns the prompts all of whose completions have ended since the last call; none while the engine is paused.

        Raises:
            WorkerError: the worker failed: once when it is noticed, and the next call returns all prompts that were
                open, with what they have and the finish reason `ERROR`. After that the engine refuses work, with the
                same error, until `restart`.
        """
        if not self._ended:
            self._refuse_if_failed()
        with self._failing_whole():
            if not self.is_paused and self.scheduler.has_work:
                self._plan_ahead()
            if self._in_flight:
                self._take_results()
        ended, self._ended = self._ended, []
        return ended

    def take_increments(self, request_id: str) -> list[Increment]:
        """What became known of a streamed prompt since the last call; nothing, once its end was taken.

        The increments of a completion end with one that has a finish reason, whatever ended it.
        """
        opened = self._open.get(request_id) or self._unread.get(request_id)
        if opened is None:
            return []
        increments = opened.take_increments(self.scheduler.requests, self.scheduler.ledger)
        if opened.has_ended:
            self._unread.pop(request_id, None)
        return increments

    @interrupts_held()
    def abort(self, request_id: str) -> RequestOutput | None:
        """End all open completions of a prompt; what they have so far comes back, rows included.

        Returns None when no such prompt is open, or it is streamed: then :meth:`take_increments` has its end.
        """
        output = self._end_prompt(request_id, FinishReason.ABORT)
        self._drop_when_idle()
        return output

    @interrupts_held()
    def forget(self, request_ids: Collection[str]) -> None:
        """Nobody waits for these prompts any more: abort what is open of them, and drop what has ended."""
        for request_id in request_ids:
            self._end_prompt(request_id, FinishReason.ABORT)
            self._unread.pop(request_id, None)
        self._ended = [output for output in self._ended if output.request_id not in request_ids]
        self._drop_when_idle()

    def keep(self, outputs: Iterable[RequestOutput]) -> None:
        """Return these outputs, which were taken by somebody who does not want them, with the next `step`."""
        self._ended += outputs

    def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        """Plan no further step until `resume`. Steps under way are waited for.

        Args:
            mode: what becomes of open requests: `WAIT` runs them to their end first, `ABORT` ends them with what they
                have, `KEEP` leaves them where they are. What ended is returned by the next `step`.
        """
        with self._failing_whole():
            while mode is PauseMode.WAIT and self.scheduler.has_work:
                self._plan_ahead()
                self._take_results()
            while self._in_flight:
                self._take_results()
        if mode is PauseMode.ABORT:
            for request_id in list(self._open):
                output = self.abort(request_id)
                self._ended += [] if output is None else [output]
        self.is_paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self.is_paused = False

    def reset_prefix_cache(self) -> None:
        """Forget all shared prefixes."""
        self.scheduler.cache.reset_prefix_cache()

    def update_weights(self, source: str | Weights, mode: PauseMode = PauseMode.WAIT) -> int:
        """Replace the model's weights; returns their new version, which rows computed from now on carry.

        Shared prefixes are forgotten. A request that is kept goes on from the keys and values that the old weights
        made, and keeps its old rows: they made its tokens.

        Args:
            source: a folder, a hub id, or tensors by name; parameters that are not named keep their values.
            mode: what becomes of open requests, see :meth:`pause`.

        Raises:
            ModelError: the weights do not fit or are not there; then nothing has changed.
            WorkerError: the worker failed; see :meth:`step`.
        """
        self._refuse_if_failed()
        was_paused = self.is_paused
        try:
            with self._failing_whole():
                self.executor.stage_weights(source)
                self.pause(mode)
                self._is_changing = True
                self.served = replace(self.served, fingerprint=self.executor.commit_weights())
                self.reset_prefix_cache()
                self.scheduler.weight_version += 1
                self._is_changing = False
        finally:
            self.is_paused = was_paused
        return self.scheduler.weight_version

    def check_integrity(self) -> None:
        """Recount blocks, rows and the worker's requests.

        Raises:
            IntegrityError: a leak or a contradiction.
        """
        self.scheduler.check_integrity()
        children = {child for opened in self._open.values() for child in opened.open_children()}
        if children != set(self.scheduler.requests):
            raise IntegrityError("completions and scheduled requests differ")
        is_idle = not self.scheduler.has_work and not self._in_flight
        if is_idle and self._failure is None:
            with self._failing_whole():
                self.executor.check_idle()

    def shutdown(self) -> None:
        """Stop the worker, and end open requests as when it fails. A second call does nothing."""
        if self._failure is None:
            self._fail(WorkerError("the engine was shut down; restart() starts it again"))

    def restart(self) -> int:
        """Start the worker afresh, after it failed or at any other time; returns the version of its weights.

        Open requests end as when the worker fails, and no prefix is known any more. A worker in another process has
        the weights again that the engine began with; where these are not those that were served last, which the
        fingerprint tells, rows carry a new version. Call `update_weights` to go on from the old ones.

        Raises:
            RoutebookError: the worker does not start; the engine still stands still, and this can be called again.
        """
        self.shutdown()
        served = self.executor.start()
        version = self.scheduler.weight_version + (served.fingerprint != self.served.fingerprint)
        self.served = served
        self.scheduler = make_scheduler(self.config, self.served)
        self.scheduler.weight_version = version
        self._failure = None
        self.is_paused = False
        return version

    def check_running(self) -> None:
        """Refuse to wait for a prompt that will not be served.

        Raises:
            WorkerError: the worker failed, and `restart` was not called.
            RequestError: the engine is paused.
        """
        self._refuse_if_failed()
        if self.is_paused:
            raise RequestError("the engine is paused; call resume() first")

    def _refuse_if_failed(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    @contextmanager
    def _failing_whole(self) -> Iterator[None]:
        """Let a failure of the worker inside end all open requests before it is raised.

        An interrupt from the keyboard while the worker changes something is one too: how far did it come?
        """
        try:
            yield
        except WorkerError as error:
            self._fail(error)
            raise
        except KeyboardInterrupt:
            if self._is_changing:
                self._fail(WorkerError("a step was interrupted; restart() goes on"))
            raise

    def _fail(self, error: WorkerError) -> None:
        """Stop the worker and end every open request; results of steps under way are lost."""
        if self._failure is not None:
            return
        self._failure = error
        self.executor.shutdown()
        self._in_flight.clear()
        self._is_changing = False
        error.request_ids = tuple(self._open)
        for request_id in error.request_ids:
            output = self._end_prompt(request_id, FinishReason.ERROR, str(error))
            self._ended += [] if output is None else [output]
        self.scheduler.take_dropped()

    def _plan_ahead(self) -> None:
        while len(self._in_flight) < self.config.scheduler.max_steps_in_flight:
            with interrupts_held():
                plan = self.scheduler.schedule()
                self._is_changing = plan is not None
            if plan is None:
                break
            self._in_flight.append((plan, self.executor.submit(plan)))
            self._is_changing = False
        assert self._in_flight, "work waits, but nothing could be planned"

    def _take_results(self) -> None:
        """Wait for the oldest step under way and give its results to the requests."""
        plan, future = self._in_flight[0]
        # An interrupt from the keyboard while this waits leaves the step where it is.
        output = future.result()
        with interrupts_held():
            self._in_flight.popleft()
            for request in self.scheduler.update_from_output(plan, output):
                self._detokenize(request)
                if request.status is RequestStatus.FINISHED:
                    ended = self._close(request)
                    self._ended += [] if ended is None else [ended]
            self._drop_when_idle()

    def _drop_when_idle(self) -> None:
        """Finished requests are told to the worker with the next step, unless there is none."""
        if not self.scheduler.has_work and not self._in_flight and self._failure is None:
            self.executor.drop(self.scheduler.take_dropped())
            if self.config.cache.check_when_idle:
                self.check_integrity()

    def _make_detokenizers(
        self, params: SamplingParams, streamed: bool
    ) -> list[Detokenizer | None]:
        tokenizer = self.tokenizer
        return [
            None if tokenizer is None else Detokenizer(tokenizer, params, streamed=streamed)
            for _ in range(params.n)
        ]

    def _add_child(
        self,
        opened: OpenPrompt,
        index: int,
        earlier: RoutedExperts | None,
        forced: bool,
        cache_salt: str,
    ) -> None:
        num_prompt_tokens = len(opened.prompt_token_ids)
        self.scheduler.add(
            Request(
                request_id=opened.child_id(index),
                token_ids=list(opened.prompt_token_ids),
                num_prompt_tokens=num_prompt_tokens,
                params=opened.params,
                seed=opened.child_seed(index),
                max_num_tokens=min(
                    self.max_model_len, num_prompt_tokens + opened.params.max_tokens
                ),
                earlier=earlier,
                forced=forced,
                cache_salt=cache_salt.encode(),
            )
        )

    def _opened(self, request: Request) -> tuple[OpenPrompt, int]:
        """The prompt of a request, and which of its completions it is."""
        request_id, _, index = request.request_id.rpartition(".")
        return self._open[request_id], int(index)

    def _detokenize(self, request: Request) -> None:
        """Follow the text, and end the completion where a stop text appears."""
        opened, index = self._opened(request)
        detokenizer = opened.detokenizers[index]
        # An end-of-sequence token may be none of the text's.
        belongs = len(request.text_token_ids) == len(request.output_token_ids)
        if detokenizer is None or not belongs:
            return
        stop_text = detokenizer.add(request.token_ids[-1])
        if stop_text is None:
            return
        if request.status is RequestStatus.FINISHED:
            request.finish_reason, request.stop_reason = FinishReason.STOP, stop_text
        else:
            self.scheduler.finish(request, FinishReason.STOP, stop_text)

    def _end_prompt(
        self, request_id: str, reason: FinishReason, stop_reason: str | None = None
    ) -> RequestOutput | None:
        """End all open completions of a prompt with what they have; None when it has none."""
        output: RequestOutput | None = None
        opened = self._open.get(request_id)
        for child_id in list(opened.open_children()) if opened is not None else []:
            request = self.scheduler.requests[child_id]
            self.scheduler.finish(request, reason, stop_reason)
            output = self._close(request)
        return output

    def _close(self, request: Request) -> RequestOutput | None:
        """Make the completion's output; returns the prompt's when it was the last one."""
        opened, _ = self._opened(request)
        output = opened.close(request, self.scheduler.ledger)
        self.scheduler.release(request)
        if opened.has_ended:
            del self._open[opened.request_id]
            if opened.streamed:
                self._unread[opened.request_id] = opened
        return output
