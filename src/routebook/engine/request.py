"""One completion being generated: the scheduler's view."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from routebook.engine.sampling_params import SamplingParams
from routebook.engine.step import TokenLogprobs
from routebook.routes import RoutedExperts


class RequestStatus(Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    """The worker failed."""


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """State of one completion. `token_ids` is the prompt followed by what was generated."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    max_num_tokens: int
    """Prompt and completion at most: by `max_tokens`, or by the model."""

    earlier: RoutedExperts | None = None
    """Record of an earlier, aborted run over the first tokens of this prompt: its rows are kept."""
    forced: bool = False
    """Whether the tokens that `earlier` has rows for are routed along them again."""

    cache_salt: bytes = b""
    """Its prefix is shared only with requests of the same salt."""

    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    """Tokens whose keys and values lie in the request's blocks, those of a step under way included."""
    num_placeholders: int = 0
    """Tokens that steps under way will sample: the worker will know them before the scheduler does."""
    num_preemptions: int = 0
    """How often it lost its blocks, which is the number of its current run."""
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    hash_generation: int = 0
    """Generation of the prefix cache that `block_hashes` belong to."""
    num_named_blocks: int = 0
    """Leading blocks that have been offered to the prefix cache."""
    rows_from: int = 0
    """Rows below this position may be missing, since they were computed in a step without capture."""

    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def wants_capture(self) -> bool:
        """Whether the steps that run it must be captured."""
        return self.params.routed_experts or self.forced

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        return len(self.token_ids)

    @property
    def num_unscheduled_tokens(self) -> int:
        """Tokens that the next step could compute, sampled ones included that are still under way.

        None while a token is under way that will end the completion by its length.
        """
        if self.num_placeholders and self.num_tokens + self.num_placeholders >= self.max_num_tokens:
            return 0
        return self.num_tokens + self.num_placeholders - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def text_token_ids(self) -> list[int]:
        """Generated tokens that its text is made of: without an end-of-sequence token, unless that was asked for."""
        is_ended_by_eos = self.finish_reason is FinishReason.STOP and self.stop_reason is None
        if is_ended_by_eos and not self.params.include_stop_text:
            return self.output_token_ids[:-1]
        return self.output_token_ids

    @property
    def num_rows(self) -> int:
        """Rows of the finished completion: the last token was never an input."""
        return len(self.token_ids) - 1
