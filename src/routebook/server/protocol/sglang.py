"""`/generate`, with the fields of SGLang."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from routebook.server.protocol.base import (
    Body,
    Empty,
    MinusOne,
    Name,
    Off,
    One,
    Stop,
    StopTokenIds,
    Zero,
)

_MOST_PROMPTS = 1024


class SGLangSamplingParams(Body):
    """How to generate."""

    n: int = 1
    max_new_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: Stop = None
    stop_token_ids: StopTokenIds = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    presence_penalty: Zero = None
    frequency_penalty: Zero = None
    repetition_penalty: One = None
    min_new_tokens: Zero = None
    logit_bias: Empty = None
    json_schema: None = None
    regex: None = None
    ebnf: None = None


class SGLangRequest(Body):
    """Texts or token ids to complete; one of `text` and `input_ids`."""

    text: str | Annotated[list[str], Field(min_length=1, max_length=_MOST_PROMPTS)] | None = None
    input_ids: (
        Annotated[list[int], Field(min_length=1)]
        | Annotated[list[list[int]], Field(min_length=1, max_length=_MOST_PROMPTS)]
        | None
    ) = None
    sampling_params: SGLangSamplingParams = SGLangSamplingParams()
    rid: Name | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: MinusOne = None
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    return_routed_experts: bool | None = None
    routed_experts_start_len: int = Field(default=0, ge=0)
    return_hidden_states: Off = None
    image_data: None = None
