"""vLLM's scheduler with a :class:`RowKeeper` beside it; `scheduler_cls` is `make_scheduler` of this module.

Nothing of vLLM's methods is copied or changed; each is called, and the keeper is told what came of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from routebook.errors import ConfigError
from routebook.hosts.vllm.config import HostConfig
from routebook.hosts.vllm.kv_group import positional_group
from routebook.hosts.vllm.refusals import check_vllm_config
from routebook.hosts.vllm.releases import installed_version, release_of
from routebook.hosts.vllm.row_keeper import RowKeeper

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Base
else:
    _Base = object


class RowsMixin(_Base):  # type: ignore[misc]
    """Goes before a scheduler class of vLLM."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_vllm_config(self.vllm_config, release_of(installed_version()).SPECULATION)
        groups = self.kv_cache_config.kv_cache_groups
        group, block_size = positional_group(groups, FullAttentionSpec)
        prefix_caching = bool(self.cache_config.enable_prefix_caching)
        if prefix_caching and self.hash_block_size != block_size:
            raise ConfigError(
                f"Routebook refuses KV blocks of {block_size} tokens that are hashed by"
                f" {self.hash_block_size} in vLLM; set enable_prefix_caching=False"
            )
        self.row_keeper = RowKeeper(
            HostConfig.read(self.vllm_config.additional_config),
            block_size=block_size,
            group=group,
            prefix_caching=prefix_caching,
        )

    def add_request(self, request: Any) -> None:
        """Queue a request, or continue a session."""
        super().add_request(request)
        self.row_keeper.begin(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step."""
        scheduler_output = super().schedule(*args, **kwargs)
        self.row_keeper.plan(scheduler_output)
        return scheduler_output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take over what a step computed; the outputs carry the rows that are final with it."""
        stored = self.row_keeper.store(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        each = chain.from_iterable(o.outputs for o in outputs.values())
        broken = self.row_keeper.deliver(scheduler_output, each, stored)
        if broken:
            self._fail(broken)
        self.row_keeper.drop(self.requests, scheduler_output.num_scheduled_tokens)
        return outputs

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, *args: Any, **kw: Any
    ) -> Any:
        """End requests from outside: aborts, and errors of single requests."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        ids = None if ids is None else list(ids)
        finished = super().finish_requests(ids, *args, **kw)
        self.row_keeper.drop(self.requests, ids)
        return finished

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, *args: Any, **kw: Any
    ) -> Any:
        """Forget shared prefixes; if asked, recompute the running requests too."""
        if reset_running_requests:
            self.row_keeper.throw_away(request.request_id for request in self.running)
        done = super().reset_prefix_cache(reset_running_requests, *args, **kw)
        if done:
            self.row_keeper.reset()
        return done

    def _fail(self, outputs: list[Any]) -> None:
        """Rows that were sent cannot be taken back, nor completed: the request fails rather than look complete."""
        self.finish_requests([o.request_id for o in outputs], RequestStatus.FINISHED_ERROR)
        for output in outputs:
            output.finish_reason = FinishReason.ERROR


class RowsScheduler(RowsMixin, Scheduler):  # type: ignore[misc]
    """For one step at a time."""


class AsyncRowsScheduler(RowsMixin, AsyncScheduler):  # type: ignore[misc]
    """For asynchronous scheduling."""


def make_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the scheduler that vLLM would have made, with rows.

    Raises:
        ConfigError: rows cannot be had in this configuration.
    """
    asynchronous = vllm_config.scheduler_config.async_scheduling
    scheduler_class = AsyncRowsScheduler if asynchronous else RowsScheduler
    return scheduler_class(vllm_config, *args, **kwargs)
