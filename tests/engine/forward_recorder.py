"""An independent note of every forward that ran: who, where, which experts, in which forward.

It reads the plan that the worker was given and the ids that the experts received. It knows neither the capture
buffer nor the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from routebook.engine.engine import Engine
from routebook.engine.executor import LocalExecutor
from routebook.engine.running_step import RunningStep
from routebook.engine.step import SchedulerOutput
from tests.capture.recorder import ExpertsRecorder


@dataclass
class ForwardRecorder:
    """Rows of all forwards of one engine."""

    engine: Engine
    computed: dict[tuple[str, int], list[tuple[int, np.ndarray]]] = field(default_factory=dict)
    """(request, position) -> (forward number, ids `[L, K]`) in the order they ran."""
    num_forwards: int = 0

    def __post_init__(self) -> None:
        assert isinstance(self.engine.executor, LocalExecutor)
        self._worker = self.engine.executor.worker
        self._launch = self._worker.runner.launch
        self._worker.runner.launch = self._recorded  # type: ignore[method-assign]

    def _recorded(self, step: SchedulerOutput) -> RunningStep:
        recorder = ExpertsRecorder()
        with recorder.recording(self._worker.loaded.model):
            running = self._launch(step)
        num_layers = self.engine.schema.num_layers
        layers = [torch.cat(recorder.ids_LNK[layer::num_layers]) for layer in range(num_layers)]
        rows = torch.stack(layers, dim=1).numpy()
        places = [
            (request_id, step.num_computed_tokens[request_id] + offset)
            for request_id, count in step.num_scheduled_tokens.items()
            for offset in range(count)
        ]
        assert len(places) == len(rows)
        for place, row in zip(places, rows, strict=True):
            self.computed.setdefault(place, []).append((self.num_forwards, row))
        self.num_forwards += 1
        return running
