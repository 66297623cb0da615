"""An output of vLLM that is not complete yet, on its way with rows that are."""

from __future__ import annotations

from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput

from routebook.hosts.vllm.message import StepMessage, attach


class AsyncRowsOutput(AsyncModelRunnerOutput):  # type: ignore[misc]
    """vLLM's output with asynchronous scheduling: whoever waits for it gets the rows with it.

    Args:
        output: vLLM's own.
        rows: of the same step.
    """

    def __init__(self, output: Any, rows: StepMessage) -> None:
        self._output, self._rows = output, rows

    def get_output(self) -> Any:
        """Wait for the output."""
        output = self._output.get_output()
        attach(output, self._rows)
        return output
