"""Who runs the worker: this thread, one beside it, or a process of its own.

Steps run one after the other in the order they were submitted, whoever runs them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from routebook.engine.config import EngineConfig
from routebook.engine.served_model import ServedModel
from routebook.engine.step import ModelRunnerOutput, SchedulerOutput
from routebook.engine.weights import Weights
from routebook.engine.worker import LaunchedStep, Worker


class StepResult(Protocol):
    """Results of a submitted step, once they are there."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step. An interrupted wait can be repeated.

        Raises:
            WorkerError: the step failed, or its worker ended.
        """


class Executor(ABC):
    """Runs a worker. Whatever fails in it beyond a caller's mistake is raised as a WorkerError."""

    @abstractmethod
    def start(self) -> ServedModel:
        """Start the worker; after `shutdown` or a failure, start afresh. No request is known to it then.

        Raises:
            ModelError: the model cannot be used; the message says why.
            ConfigError: the options do not fit the model or each other.
        """

    @abstractmethod
    def submit(self, step: SchedulerOutput) -> StepResult:
        """Queue a step behind those submitted before.

        Raises:
            WorkerError: the step failed at once.
        """

    @abstractmethod
    def drop(self, request_ids: list[str]) -> None:
        """Let the worker forget requests, while no step is under way."""

    @abstractmethod
    def check_idle(self) -> None:
        """Let the worker recount what it holds, while no request lives.

        Raises:
            IntegrityError: it holds something.
        """

    @abstractmethod
    def stage_weights(self, source: str | Weights) -> None:
        """Let the worker read and check new weights; steps may be under way.

        Raises:
            ModelError: the weights do not fit or are not there.
        """

    @abstractmethod
    def commit_weights(self) -> str:
        """Let the worker use the staged weights, while no step is under way; returns their fingerprint."""

    @abstractmethod
    def shutdown(self) -> None:
        """Wait for what runs, drop what is queued, and stop. A model given from memory is its owner's again.

        A second call does nothing.
        """


class LocalExecutor(Executor):
    """Runs a worker of this process.

    Args:
        model: a folder, a hub id, a bundled name, or a transformers model.
        config: options of the engine's components.
    """

    def __init__(self, model: str | Any, config: EngineConfig) -> None:
        self._model = model
        self._config = config
        self._worker: Worker | None = None

    @property
    def worker(self) -> Worker:
        """The worker, once started."""
        assert self._worker is not None, "the worker was not started"
        return self._worker

    def start(self) -> ServedModel:
        """Load the model, or take the one that was loaded before, with its present weights."""
        if self._worker is None:
            self._worker = Worker(self._model, self._config)
        else:
            self._worker.close()
            self._worker.reopen()
        return self._worker.describe()

    def shutdown(self) -> None:
        """Give the model back, see :meth:`Worker.close`; a named one stays loaded for the next `start`."""
        if self._worker is not None:
            self._worker.close()

    def drop(self, request_ids: list[str]) -> None:
        """See :meth:`Executor.drop`."""
        self.worker.drop(request_ids)

    def check_idle(self) -> None:
        """See :meth:`Executor.check_idle`."""
        self.worker.check_idle()

    def stage_weights(self, source: str | Weights) -> None:
        """See :meth:`Executor.stage_weights`."""
        self.worker.stage_weights(source)

    def commit_weights(self) -> str:
        """See :meth:`Executor.commit_weights`."""
        return self.worker.commit_weights()


class InlineExecutor(LocalExecutor):
    """Runs each step at once, in the caller's thread."""

    def submit(self, step: SchedulerOutput) -> StepResult:
        """Run the step, on CUDA queue it; the error of a step that fails at once is raised here."""
        return self.worker.launch(step)


@dataclass(frozen=True, slots=True)
class _LaunchedLater:
    """A step that the worker's thread will launch."""

    launched: Future[LaunchedStep]

    def result(self) -> ModelRunnerOutput:
        """See :meth:`StepResult.result`."""
        return self.launched.result().result()


class ThreadExecutor(LocalExecutor):
    """Runs steps in a thread of their own, so that the next one can be planned meanwhile."""

    def start(self) -> ServedModel:
        """Start the thread."""
        served = super().start()
        # A new thread does not inherit the number of threads that torch was told to use.
        self._pool = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="routebook-worker",
            initializer=torch.set_num_threads,
            initargs=(torch.get_num_threads(),),
        )
        return served

    def submit(self, step: SchedulerOutput) -> StepResult:
        """Queue the step; its error is raised by the result."""
        return _LaunchedLater(self._pool.submit(lambda: self.worker.launch(step)))

    def shutdown(self) -> None:
        """Stop the thread once the step that runs has ended, and give the model back."""
        self._pool.shutdown(cancel_futures=True)
        super().shutdown()
