"""Who runs the worker: this thread, or one beside it.

Steps run one after the other in the order they were submitted, whoever runs them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from routebook.engine.model_runner import ModelRunner
from routebook.engine.step import ModelRunnerOutput, SchedulerOutput


class Executor(ABC):
    """Runs steps on a worker."""

    @abstractmethod
    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Queue a step behind those submitted before."""

    @abstractmethod
    def shutdown(self) -> None:
        """Wait for what runs, drop what is queued, and stop. A second call does nothing."""


class InlineExecutor(Executor):
    """Runs each step at once, in the caller's thread."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run the step; the future is done, or the step's error is raised here."""
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(self._runner.execute(step))
        return future

    def shutdown(self) -> None:
        """Nothing runs between calls."""


class ThreadExecutor(Executor):
    """Runs steps in a thread of their own, so that the next one can be planned meanwhile."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        # A new thread does not inherit the number of threads that torch was told to use.
        self._pool = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="routebook-worker",
            initializer=torch.set_num_threads,
            initargs=(torch.get_num_threads(),),
        )

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Queue the step; its error is raised by the future's `result`."""
        return self._pool.submit(lambda: self._runner.execute(step))

    def shutdown(self) -> None:
        """Stop the thread once the step that runs has ended."""
        self._pool.shutdown(cancel_futures=True)
