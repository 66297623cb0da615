"""What every worker of vLLM does besides its work: it captures the rows of each step and lets the output carry them.

vLLM runs the forward pass of a step in `execute_model` and makes the output in `sample_tokens`, always in pairs. The
rows are taken between the two, before a draft model runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.outputs import AsyncModelRunnerOutput

from routebook.hosts.vllm.config import HostConfig
from routebook.hosts.vllm.message import StepMessage, attach
from routebook.hosts.vllm.model_capture import ModelCapture, Stages
from routebook.hosts.vllm.refusals import check_vllm_config
from routebook.hosts.vllm.releases import installed_version, release_of
from routebook.hosts.vllm.rows_output import AsyncRowsOutput
from routebook.routes.schema import RouteSchema

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Base
else:
    _Base = object


class RowsWorkerMixin(_Base):  # type: ignore[misc]
    """Goes before a worker class of vLLM."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        HostConfig.read(vllm_config.additional_config)
        self._release = release_of(installed_version())
        check_vllm_config(vllm_config, self._release.SPECULATION)
        self._rows: StepMessage | None = None
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, **kwargs: Any) -> None:
        """Load, then bind: before any forward pass that vLLM may compile."""
        super().load_model(**kwargs)
        config = self.vllm_config
        self._capture = ModelCapture(
            self.model_runner.get_model(),
            self._release,
            num_hidden_layers=config.model_config.hf_text_config.num_hidden_layers,
            max_tokens=config.scheduler_config.max_num_batched_tokens,
            stages=_stages(),
            answers=get_tp_group().is_first_rank,
        )

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """vLLM makes the kernels anew, so they are bound anew."""
        super().reload_weights(*args, **kwargs)
        self._capture.bind()

    def finish_weight_update(self) -> None:
        """As after `reload_weights`."""
        super().finish_weight_update()
        self._capture.bind()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the forward pass of a step and take its rows."""
        num_tokens = scheduler_output.total_num_scheduled_tokens
        self._capture.begin(num_tokens)
        output = super().execute_model(scheduler_output)
        self._rows = self._capture.end(num_tokens)
        return self._carry(output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, and let the output carry the rows of the forward pass before."""
        return self._carry(super().sample_tokens(grammar_output))

    def route_schema(self) -> RouteSchema:
        """What the axes of the rows mean; for `collective_rpc`."""
        return self._capture.schema

    def _carry(self, output: Any) -> Any:
        rows = self._rows
        if rows is None or output is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            self._rows = None
            return AsyncRowsOutput(output, rows)
        # An output without requests is one object that all steps share.
        if output.req_ids:
            self._rows = None
            attach(output, rows)
        return output


def _stages() -> Stages:
    group = get_pp_group()
    is_split = group.world_size > 1
    return Stages(group.ranks, group.rank_in_group, group.cpu_group if is_split else None)
