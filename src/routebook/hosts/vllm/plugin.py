"""A general plugin of vLLM, for programs that make their engine themselves: an environment variable puts rows in it.

`ROUTEBOOK_VLLM=all` (or `asked`) does to every engine of the process what `routebook.hosts.vllm.LLM` does to its own.
Without the variable the plugin does nothing.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from routebook.hosts.vllm.config import HostConfig
from routebook.hosts.vllm.launch import check_platform, engine_args

VARIABLE = "ROUTEBOOK_VLLM"


def register() -> None:
    """Called by vLLM once in each of its processes.

    Raises:
        ConfigError: the variable has a value that is not known.
    """
    rows = os.environ.get(VARIABLE)
    if rows is not None:
        _put_in(HostConfig(rows=rows))


def _put_in(config: HostConfig) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    create = EngineArgs.create_engine_config
    names = ("worker_cls", "scheduler_cls", "additional_config")

    @functools.wraps(create)
    def create_with_rows(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_platform(current_platform.is_cpu())
        given = {name: getattr(self, name) for name in names}
        for name, value in engine_args(config, given).items():
            setattr(self, name, value)
        return create(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_with_rows
