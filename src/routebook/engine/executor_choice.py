"""Which executor an engine gets."""

from __future__ import annotations

from typing import Any

from routebook.engine.config import EngineConfig
from routebook.engine.executor import Executor, InlineExecutor, ThreadExecutor
from routebook.engine.process_executor import ProcessExecutor


def make_executor(model: str | Any, config: EngineConfig) -> Executor:
    """The executor that the option `executor` names, not started yet.

    Raises:
        ConfigError: it cannot take a model in memory.
    """
    match config.executor.executor:
        case "process":
            return ProcessExecutor(model, config)
        case "thread":
            return ThreadExecutor(model, config)
        case "auto" if config.scheduler.max_steps_in_flight > 1:
            return ThreadExecutor(model, config)
        case _:
            return InlineExecutor(model, config)
