"""An executor that runs each step as late as it can: when its results are asked for.

The worker is then always behind the scheduler by as many steps as are in flight, which a thread is only by chance.
"""

from __future__ import annotations

from routebook.engine.executor import InlineExecutor, StepResult
from routebook.engine.step import ModelRunnerOutput, SchedulerOutput


class LateExecutor(InlineExecutor):
    """Runs a step of this thread's worker when somebody waits for it."""

    def submit(self, step: SchedulerOutput) -> StepResult:
        """Queue the step; waiting for a later one first would run them out of order, and nobody does."""
        return _LateResult(self, step)


class _LateResult:
    def __init__(self, executor: LateExecutor, step: SchedulerOutput) -> None:
        self._executor = executor
        self._step = step
        self._output: ModelRunnerOutput | None = None

    def result(self) -> ModelRunnerOutput:
        if self._output is None:
            self._output = self._executor.worker.launch(self._step).result()
        return self._output
