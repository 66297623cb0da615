"""The engine: takes requests, runs steps, hands out completions with their rows.

It owns one scheduler and one worker and moves data between them; each of them could sit in another process.
"""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from routebook.engine.block_pool import BlockPool
from routebook.engine.config import EngineConfig
from routebook.engine.detokenizer import Detokenizer
from routebook.engine.executor import InlineExecutor, ThreadExecutor
from routebook.engine.kv_cache_manager import KVCacheManager
from routebook.engine.model_loader import LoadedModel, load_model, model_fingerprint
from routebook.engine.model_runner import ModelRunner
from routebook.engine.outputs import CompletionOutput, RequestOutput
from routebook.engine.record_builder import build_record
from routebook.engine.request import FinishReason, Request, RequestStatus
from routebook.engine.sampling_params import SamplingParams
from routebook.engine.scheduler import Scheduler
from routebook.engine.step import ModelRunnerOutput, SchedulerOutput
from routebook.engine.weights import Weights, check_weights, copy_weights, read_weights
from routebook.errors import (
    ConfigError,
    IntegrityError,
    RequestError,
    SchemaMismatchError,
    SpanError,
)
from routebook.ledger import RequestLedger
from routebook.routes import RoutedExperts, RouteSchema


class PauseMode(Enum):
    """What becomes of open requests when the engine pauses."""

    WAIT = "wait"
    ABORT = "abort"
    KEEP = "keep"


@dataclass(slots=True)
class _Group:
    """A prompt with its `n` completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    choices: dict[int, CompletionOutput] = field(default_factory=dict)


@dataclass(slots=True)
class _Child:
    """One completion of a group."""

    group: _Group
    index: int
    detokenizer: Detokenizer | None


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
        self.loaded: LoadedModel = load_model(model, tokenizer, config.model)
        self.runner = ModelRunner(
            self.loaded,
            reference=config.model.reference,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        )
        self.schema: RouteSchema = self.runner.capturer.schema
        self.max_model_len = self._allocate()
        self.scheduler = self._make_scheduler()
        ahead = config.scheduler.max_steps_in_flight
        self._executor = ThreadExecutor(self.runner) if ahead > 1 else InlineExecutor(self.runner)
        self._in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        self._random = random.Random(config.scheduler.base_seed)
        self._children: dict[str, _Child] = {}
        self._num_requests = 0
        self._ended: list[RequestOutput] = []
        self.is_paused = False

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, a step is under way, or an output waits to be taken."""
        return self.scheduler.has_work or bool(self._in_flight or self._ended)

    def tokenize(self, prompt: str) -> list[int]:
        """Token ids of a text, as the model's tokenizer makes them.

        Raises:
            RequestError: the model has no tokenizer.
        """
        if self.loaded.tokenizer is None:
            raise RequestError("the model has no tokenizer; give token ids instead of a text")
        token_ids: list[int] = self.loaded.tokenizer.encode(prompt)
        return token_ids

    def check_request(self, token_ids: list[int], params: SamplingParams) -> None:
        """Refuse what cannot be served, before anything is queued.

        Raises:
            RequestError: an empty or too long prompt, a token id outside the vocabulary, a start beyond the prompt.
        """
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one token")
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; with max_model_len={self.max_model_len} it may have"
                f" {self.max_model_len - 1} at most"
            )
        vocabulary = range(self.loaded.vocab_size)
        wrong = next((t for t in (*token_ids, *params.stop_token_ids) if t not in vocabulary), None)
        if wrong is not None:
            raise RequestError(
                f"token id {wrong} lies outside the vocabulary of {self.loaded.vocab_size}"
            )
        if params.routed_experts_prompt_start > len(token_ids):
            raise RequestError(
                f"routed_experts_prompt_start={params.routed_experts_prompt_start} lies beyond the prompt of"
                f" {len(token_ids)} tokens"
            )
        if params.stop and self.loaded.tokenizer is None:
            raise RequestError(
                f"stop={list(params.stop)} needs a tokenizer, which the model has not"
            )

    def check_continuation(
        self, token_ids: list[int], params: SamplingParams, earlier: RoutedExperts, forced: bool
    ) -> None:
        """Refuse to continue a record that does not belong to these tokens, this model or these parameters.

        Raises:
            RecordError: the record is of another model or other tokens.
            RequestError: the parameters leave out rows that the record has.
            UncapturableError: on this model no route can be forced.
        """
        if earlier.schema != self.schema:
            raise SchemaMismatchError(f"the record has {earlier.schema}, the model {self.schema}")
        if earlier.stop > len(token_ids):
            raise SpanError(
                f"the record ends at position {earlier.stop}, the prompt has {len(token_ids)} tokens"
            )
        earlier.check_tokens(token_ids)
        if not params.routed_experts or params.routed_experts_prompt_start:
            raise RequestError(
                "a record is continued whole; leave routed_experts=True, routed_experts_prompt_start=0"
            )
        if forced:
            self.runner.capturer.check_forcible()

    def add_request(
        self,
        token_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
        *,
        earlier: RoutedExperts | None = None,
        forced: bool = False,
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

        Raises:
            RequestError: see :meth:`check_request`; nothing was queued.
            RecordError: see :meth:`check_continuation`; nothing was queued.
        """
        self.check_request(token_ids, params)
        if earlier is not None:
            self.check_continuation(token_ids, params, earlier, forced)
        elif forced:
            raise RequestError("forced=True needs a record to force")
        request_id = str(self._num_requests)
        self._num_requests += 1
        group = _Group(request_id, prompt, tuple(token_ids), params)
        base_seed = self._random.getrandbits(62) if params.seed is None else params.seed
        for index in range(params.n):
            self._add_child(group, index, base_seed + index, earlier, forced)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Plan ahead as far as allowed, and take the results of the oldest step under way.

        Returns the prompts all of whose completions have ended since the last call; none while the engine is paused.
        """
        if not self.is_paused and self.scheduler.has_work:
            self._plan_ahead()
        if self._in_flight:
            self._take_results()
        ended, self._ended = self._ended, []
        return ended

    def abort(self, request_id: str) -> RequestOutput | None:
        """End all open completions of a prompt; what they have so far comes back, rows included.

        Returns None when no such prompt is open.
        """
        output: RequestOutput | None = None
        for child_id, child in list(self._children.items()):
            if child.group.request_id == request_id:
                request = self.scheduler.requests[child_id]
                self.scheduler.finish(request, FinishReason.ABORT)
                output = self._close(request)
        self._drop_when_idle()
        return output

    def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        """Plan no further step until `resume`. Steps under way are waited for.

        Args:
            mode: what becomes of open requests: `WAIT` runs them to their end first, `ABORT` ends them with what they
                have, `KEEP` leaves them where they are. What ended is returned by the next `step`.
        """
        if mode is PauseMode.WAIT:
            while self.scheduler.has_work:
                self._plan_ahead()
                self._take_results()
        while self._in_flight:
            self._take_results()
        if mode is PauseMode.ABORT:
            for group in {child.group.request_id for child in self._children.values()}:
                output = self.abort(group)
                assert output is not None, "an open prompt was not there to be aborted"
                self._ended.append(output)
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
        """
        weights = read_weights(source)
        check_weights(self.loaded.model, weights)
        was_paused = self.is_paused
        self.pause(mode)
        copy_weights(self.loaded.model, weights)
        self.loaded = replace(self.loaded, fingerprint=model_fingerprint(self.loaded.model))
        self.reset_prefix_cache()
        self.scheduler.weight_version += 1
        self.is_paused = was_paused
        return self.scheduler.weight_version

    def check_integrity(self) -> None:
        """Recount blocks, rows and the worker's requests.

        Raises:
            IntegrityError: a leak or a contradiction.
        """
        self.scheduler.check_integrity()
        if set(self._children) != set(self.scheduler.requests):
            raise IntegrityError("completions and scheduled requests differ")
        if not self.has_work:
            self.runner.check_idle()

    def shutdown(self) -> None:
        """Stop the worker. Open requests get no answer; abort them first if they should."""
        self._executor.shutdown()
        self._in_flight.clear()

    def _plan_ahead(self) -> None:
        while len(self._in_flight) < self.config.scheduler.max_steps_in_flight:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self._in_flight.append((plan, self._executor.submit(plan)))
        assert self._in_flight, "work waits, but nothing could be planned"

    def _take_results(self) -> None:
        """Wait for the oldest step under way and give its results to the requests."""
        plan, future = self._in_flight.popleft()
        for request in self.scheduler.update_from_output(plan, future.result()):
            self._detokenize(request)
            if request.status is RequestStatus.FINISHED:
                output = self._close(request)
                self._ended += [] if output is None else [output]
        self._drop_when_idle()

    def _drop_when_idle(self) -> None:
        """Finished requests are told to the worker with the next step, unless there is none."""
        if not self.scheduler.has_work and not self._in_flight:
            self.runner.drop(self.scheduler.take_dropped())

    def _allocate(self) -> int:
        """Size the pool; returns the longest sequence."""
        cache, scheduler = self.config.cache, self.config.scheduler
        limit = self.loaded.max_model_len
        if scheduler.max_model_len is not None and scheduler.max_model_len > limit:
            raise ConfigError(
                f"max_model_len={scheduler.max_model_len} exceeds the model's limit of {limit} tokens"
            )
        wanted = scheduler.max_model_len or limit
        num_blocks = self.runner.num_blocks(cache, scheduler.max_num_seqs, wanted)
        max_model_len = min(wanted, num_blocks * cache.block_size)
        if scheduler.max_model_len is not None and max_model_len < wanted:
            raise ConfigError(
                f"max_model_len={wanted} needs more than {num_blocks} KV blocks of {cache.block_size} tokens;"
                " raise num_blocks or kv_cache_gib"
            )
        self.num_blocks = num_blocks
        self.runner.allocate(num_blocks, cache.block_size, scheduler.max_num_seqs, max_model_len)
        return max_model_len

    def _make_scheduler(self) -> Scheduler:
        cache = self.config.cache
        ledger = RequestLedger(self.schema, cache.block_size)
        # The state of a recurrent layer is not in the KV blocks, so such a prefix cannot be shared.
        caching = cache.prefix_caching and self.runner.mixers is None
        manager = KVCacheManager(BlockPool(self.num_blocks), cache.block_size, ledger, caching)
        return Scheduler(
            self.config.scheduler,
            manager,
            ledger,
            eos_token_ids=self.loaded.eos_token_ids,
        )

    def _add_child(
        self, group: _Group, index: int, seed: int, earlier: RoutedExperts | None, forced: bool
    ) -> None:
        child_id = f"{group.request_id}.{index}"
        tokenizer = self.loaded.tokenizer
        detokenizer = Detokenizer(tokenizer, group.params.stop) if tokenizer is not None else None
        self._children[child_id] = _Child(group, index, detokenizer)
        self.scheduler.add(
            Request(
                request_id=child_id,
                token_ids=list(group.prompt_token_ids),
                num_prompt_tokens=len(group.prompt_token_ids),
                params=group.params,
                seed=seed % 2**63,
                max_num_tokens=min(
                    self.max_model_len, len(group.prompt_token_ids) + group.params.max_tokens
                ),
                earlier=earlier,
                forced=forced,
            )
        )

    def _detokenize(self, request: Request) -> None:
        """Follow the text, and end the completion where a stop text appears."""
        child = self._children[request.request_id]
        if child.detokenizer is None:
            return
        stop_text = child.detokenizer.add(request.token_ids[-1])
        if stop_text is None:
            return
        if request.status is RequestStatus.FINISHED:
            request.finish_reason, request.stop_reason = FinishReason.STOP, stop_text
        else:
            self.scheduler.finish(request, FinishReason.STOP, stop_text)

    def _close(self, request: Request) -> RequestOutput | None:
        """Make the completion's output; returns the prompt's when it was the last one."""
        child = self._children.pop(request.request_id)
        group = child.group
        group.choices[child.index] = self._make_choice(child, request)
        self.scheduler.release(request)
        if len(group.choices) < group.params.n:
            return None
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.prompt_token_ids,
            choices=tuple(group.choices[index] for index in range(group.params.n)),
        )

    def _make_choice(self, child: _Child, request: Request) -> CompletionOutput:
        assert request.finish_reason is not None
        token_ids = tuple(request.output_token_ids)
        return CompletionOutput(
            index=child.index,
            text=child.detokenizer.text(token_ids) if child.detokenizer else "",
            token_ids=token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=tuple(request.logprobs) if request.params.logprobs is not None else None,
            routed_experts=build_record(self.scheduler.ledger, request),
        )
