"""A step is data: one value goes to the worker, one comes back.

There are no phases: a step maps each request to a number of tokens, whether they are a whole prompt, a chunk of one,
or one token of a decode. Both values are plain, so they can cross a process border.

Legend of shape suffixes: R = requests of the step, T = tokens of the step, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from routebook.capture.outputs import RoutedExpertsLists
from routebook.engine.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class ForcedRows:
    """Rows that a request's tokens must take when they are computed, instead of the routers' own choice."""

    start: int
    """Position of the first row."""
    ids_TLK: npt.NDArray[np.unsignedinteger]
    valid_T: npt.NDArray[np.bool_]
    """Rows that are not valid are chosen by the routers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRequestData:
    """A request that the worker does not hold: new, or back after a preemption."""

    request_id: str
    token_ids: npt.NDArray[np.int32]
    """All tokens known so far: the prompt, and after a preemption what was generated."""
    block_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    """Seed of this request's own random numbers; see :mod:`routebook.engine.sampler`."""
    forced: ForcedRows | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOutput:
    """What the worker shall run."""

    num_scheduled_tokens: dict[str, int]
    """Request -> number of its tokens in this step; at least one each."""
    num_computed_tokens: dict[str, int]
    """Request -> position of its first token in this step."""
    runs: dict[str, int]
    """Request -> how often it had been preempted when the step was planned."""
    weight_version: int = 0
    """Version of the weights that run the step."""
    new_requests: list[NewRequestData] = field(default_factory=list)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    """Blocks appended to requests that the worker holds."""
    dropped_request_ids: list[str] = field(default_factory=list)
    """Requests that the worker shall forget first: finished, aborted or preempted."""
    capture: bool = False
    """Whether some request of the step wants its rows."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, T."""
        return sum(self.num_scheduled_tokens.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log-probability of one sampled token, and of the most likely ones, under the unmodified logits."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """`(token id, logprob)`, most likely first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideOutputs:
    """Per-token outputs besides the sampled tokens, all in the order of the batch that ran."""

    routed_experts: RoutedExpertsLists | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRunnerOutput:
    """What the worker ran, told by the worker itself, and what came out."""

    request_ids: list[str]
    """Batch order."""
    starts_R: npt.NDArray[np.int64]
    """Position of each request's first token in this step."""
    counts_R: npt.NDArray[np.int64]
    """Tokens of each request in this step."""
    sampled_token_ids: dict[str, int]
    """Next token of each request whose known tokens are all computed."""
    logprobs: dict[str, TokenLogprobs]
    """For requests that asked."""
    side: SideOutputs
