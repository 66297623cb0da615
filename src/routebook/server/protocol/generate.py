"""`/inference/v1/generate`: tokens in, tokens out, with the fields of vLLM 0.32."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from routebook.server.protocol.base import (
    Body,
    Empty,
    Name,
    NoItems,
    One,
    RowsBody,
    Salt,
    Stop,
    StopTokenIds,
    StreamOptions,
    Zero,
)


class GenerateSamplingParams(Body):
    """How to generate."""

    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Stop = None
    stop_token_ids: StopTokenIds = None
    ignore_eos: bool = False
    logprobs: int | None = None
    routed_experts_prompt_start: int | None = Field(default=None, ge=0)
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: int | None = None
    presence_penalty: Zero = None
    frequency_penalty: Zero = None
    repetition_penalty: One = None
    min_tokens: Zero = None
    prompt_logprobs: None = None
    logit_bias: Empty = None
    bad_words: NoItems = None
    allowed_token_ids: None = None
    logprob_token_ids: None = None
    structured_outputs: None = None
    extra_args: Empty = None


class GenerateRequest(RowsBody):
    """Token ids to complete."""

    request_id: Name | None = None
    token_ids: list[int] = Field(min_length=1)
    sampling_params: GenerateSamplingParams = GenerateSamplingParams()
    model: str | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None
    priority: Zero = None
    features: None = None
    content_parts: NoItems = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None


class AbortRequest(Body):
    """Requests to end with what they have."""

    request_ids: list[str] = Field(max_length=65536)
