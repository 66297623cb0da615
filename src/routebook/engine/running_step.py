"""A step that was given to the device, and what will have come of it.

Legend of shape suffixes: B = sampled requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from routebook.capture.outputs import RoutedExpertsTensors
from routebook.engine.input_batch import StepInputs
from routebook.engine.sampler import SampledTokens
from routebook.engine.step import ModelRunnerOutput, SideOutputs


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningStep:
    """Results on their way to the host; nothing in it can be overwritten by a later step."""

    inputs: StepInputs
    sampled_ids: list[str]
    """Requests for which a token was sampled."""
    sampled: SampledTokens | None
    """On the host, once `event` has passed; None if nothing was sampled."""
    rows: RoutedExpertsTensors | None
    """Likewise; None without capture."""
    event: torch.cuda.Event | None

    def result(self) -> ModelRunnerOutput:
        """Wait for the step: one event covers its tokens, log-probabilities and rows."""
        if self.event is not None:
            self.event.synchronize()
        token_ids, logprobs = self.sampled.tolists() if self.sampled is not None else ([], {})
        return ModelRunnerOutput(
            request_ids=self.inputs.request_ids,
            starts_R=self.inputs.starts_R,
            counts_R=self.inputs.counts_R,
            sampled_token_ids=dict(zip(self.sampled_ids, token_ids, strict=True)),
            logprobs={self.sampled_ids[b]: entry for b, entry in logprobs.items()},
            side=SideOutputs(routed_experts=self.rows.tolists() if self.rows is not None else None),
        )
