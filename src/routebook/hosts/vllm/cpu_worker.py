"""The worker for CPUs: `worker_cls="routebook.hosts.vllm.cpu_worker.CPURowsWorker"`."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from routebook.hosts.vllm.worker import RowsWorkerMixin


class CPURowsWorker(RowsWorkerMixin, CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker, with rows."""

    def load_model(self, **kwargs: Any) -> None:
        """As every worker; a later pipeline stage also gets the tensors that it reads its input into.

        vLLM makes those in a warm-up, which it leaves out on a CPU when nothing is compiled.
        """
        super().load_model(**kwargs)
        if self.parallel_config.pipeline_parallel_size == 1:
            return
        runner = self.model_runner
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=self.model_config.dtype,
                device=self.device,
            )
