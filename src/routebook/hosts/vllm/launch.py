"""The options with which vLLM starts with rows in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from routebook.errors import ConfigError
from routebook.hosts.vllm.config import HostConfig

WORKER = "routebook.hosts.vllm.cpu_worker.CPURowsWorker"
SCHEDULER = "routebook.hosts.vllm.scheduler.make_scheduler"


def check_platform(is_cpu: bool) -> None:
    """Refuse a device on which rows were never compared.

    Raises:
        ConfigError: this is no CPU.
    """
    if not is_cpu:
        raise ConfigError(
            "Routebook runs inside vLLM on CPUs only: no run on another device was compared with an"
            " oracle yet"
        )


def engine_args(config: HostConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Engine arguments of vLLM with ours in them.

    Args:
        config: options of the host.
        given: what the caller passes to vLLM.

    Raises:
        ConfigError: the caller passes another worker or scheduler.
    """
    args = dict(given)
    for name, ours, unset in (("worker_cls", WORKER, "auto"), ("scheduler_cls", SCHEDULER, None)):
        if args.get(name, unset) not in (unset, ours):
            raise ConfigError(f"{name}={args[name]!r} cannot be combined with Routebook's {ours}")
        args[name] = ours
    args["additional_config"] = config.add_to(args.get("additional_config"))
    return args
