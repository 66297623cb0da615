"""The worker: one model, served step by step. Executors decide in which thread or process it lives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from routebook.engine.config import EngineConfig
from routebook.engine.implementations import Implementations
from routebook.engine.model_loader import LoadedModel, load_model, model_fingerprint
from routebook.engine.model_runner import ModelRunner
from routebook.engine.running_step import RunningStep
from routebook.engine.served_model import ServedModel
from routebook.engine.step import ModelRunnerOutput, SchedulerOutput
from routebook.engine.weights import Weights, check_weights, copy_weights, read_weights
from routebook.errors import ConfigError, UncapturableError, WorkerError


class Worker:
    """Loads the model, runs steps on it, and replaces its weights.

    A model that was given from memory is the caller's: `close` gives it back as it was found, and so does a failed
    start. What stays is that it is moved, cast and in evaluation mode.

    Args:
        model: a folder, a hub id, a bundled name, or a transformers model.
        config: options of the components.

    Raises:
        ModelError: the model cannot be used; the message says why.
        ConfigError: the options do not fit the model or each other.
    """

    def __init__(self, model: str | Any, config: EngineConfig) -> None:
        self._config = config
        self.loaded: LoadedModel
        self._found: Implementations | None
        self._runner: ModelRunner | None = None
        self._staged: Weights | None = None
        self._open(model)

    @property
    def runner(self) -> ModelRunner:
        """What runs the steps; there is none once the worker is closed."""
        assert self._runner is not None, "the worker is closed"
        return self._runner

    def describe(self) -> ServedModel:
        """What the engine has to know about the model, with the fingerprint of its present weights."""
        return ServedModel(
            name=self.loaded.name,
            fingerprint=self.loaded.fingerprint,
            dtype=str(self.loaded.dtype).removeprefix("torch."),
            schema=self.runner.capturer.schema,
            vocab_size=self.loaded.vocab_size,
            eos_token_ids=self.loaded.eos_token_ids,
            is_recurrent=self.runner.mixers is not None,
            unforcible=self._unforcible(),
            max_model_len=self._max_model_len,
            num_blocks=self._num_blocks,
        )

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        """Run one step; on CUDA queue it, so that the next one can be queued before its result is taken.

        Raises:
            WorkerError: it failed, and nobody knows what of it was done; `close` before anything else is run.
        """
        with _failing_as("a step"):
            return LaunchedStep(self.runner.launch(step))

    def drop(self, request_ids: list[str]) -> None:
        """Forget requests."""
        self.runner.drop(request_ids)

    def check_idle(self) -> None:
        """Recount what is held when no request lives.

        Raises:
            IntegrityError: something is.
        """
        self.runner.check_idle()

    def stage_weights(self, source: str | Weights) -> None:
        """Read new weights and check that they fit, without using them yet.

        Raises:
            ModelError: they do not fit or are not there.
        """
        weights = read_weights(source)
        check_weights(self.loaded.model, weights)
        self._staged = weights

    def commit_weights(self) -> str:
        """Copy the staged weights over the model's own; returns the new fingerprint.

        Raises:
            WorkerError: the copy failed, perhaps half-way.
        """
        assert self._staged is not None, "no weights were staged"
        with _failing_as("the copy of new weights"):
            copy_weights(self.loaded.model, self._staged)
        self._staged = None
        self.loaded = replace(self.loaded, fingerprint=model_fingerprint(self.loaded.model))
        return self.loaded.fingerprint

    def close(self) -> None:
        """Forget all requests, free the KV pool and give the model back. A second call does nothing."""
        runner, self._runner, self._staged = self._runner, None, None
        found, self._found = self._found, None
        try:
            if runner is not None:
                if runner.mixers is not None:
                    runner.mixers.unbind()
                runner.capturer.unbind()
        finally:
            if found is not None:
                found.restore()

    def reopen(self) -> None:
        """Take the closed model again. Its weights are as they are now, whoever changed them.

        Raises:
            ModelError, ConfigError: as at the start.
        """
        assert self._runner is None, "the worker is open"
        name = self.loaded.name
        self._open(self.loaded.model)
        self.loaded = replace(self.loaded, name=name)

    def _open(self, model: str | Any) -> None:
        """Load, bind and allocate; after a failure the model is as it was found."""
        self._found = None if isinstance(model, str) else Implementations.of(model)
        try:
            self.loaded = load_model(model, self._config.model)
            self._runner = ModelRunner(
                self.loaded,
                reference=self._config.model.reference,
                max_num_batched_tokens=self._config.scheduler.max_num_batched_tokens,
            )
            self._max_model_len, self._num_blocks = self._allocate(self._config)
        except BaseException:
            self.close()
            raise

    def _unforcible(self) -> str | None:
        try:
            self.runner.capturer.check_forcible()
        except UncapturableError as error:
            return str(error)
        return None

    def _allocate(self, config: EngineConfig) -> tuple[int, int]:
        """Size the pool; returns the longest sequence and the number of KV blocks."""
        cache, scheduler = config.cache, config.scheduler
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
        self.runner.allocate(num_blocks, cache.block_size, scheduler.max_num_seqs, max_model_len)
        return max_model_len, num_blocks


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that runs, or has run."""

    running: RunningStep

    @property
    def is_done(self) -> bool:
        """Whether `result` need not wait."""
        event = self.running.event
        return event is None or bool(event.query())  # type: ignore[no-untyped-call]

    def result(self) -> ModelRunnerOutput:
        """Wait for what came of it.

        Raises:
            WorkerError: it failed.
        """
        with _failing_as("a step"):
            return self.running.result()


@contextmanager
def _failing_as(what: str) -> Iterator[None]:
    """Tell any exception inside as a WorkerError that names it."""
    try:
        yield
    except Exception as error:
        raise WorkerError(
            f"{what} failed in the worker: {type(error).__name__}: {error}"
        ) from error
