"""What the bodies of all endpoints have in common.

Fields of other servers that would change an answer, and are not implemented here, are declared with the one value that
changes nothing, so that clients which send it are served and all others learn of it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from routebook.routes.formats import FORMAT_NAMES, get_format

_MOST_STOPS = 64
_LONGEST_STOP = 1024
_LONGEST_NAME = 256

Zero = Annotated[float, Field(ge=0, le=0)] | None
One = Annotated[float, Field(ge=1, le=1)] | None
MinusOne = Annotated[int, Field(ge=-1, le=-1)] | None
Off = Literal[False] | None
Empty = Annotated[dict[str, Any], Field(max_length=0)] | None
NoItems = Annotated[list[Any], Field(max_length=0)] | None

Salt = Annotated[str, Field(min_length=1, max_length=1024)]
Name = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME)]
Stop = (
    Annotated[str, Field(max_length=_LONGEST_STOP)]
    | Annotated[
        list[Annotated[str, Field(max_length=_LONGEST_STOP)]], Field(max_length=_MOST_STOPS)
    ]
    | None
)
StopTokenIds = Annotated[list[int], Field(max_length=_MOST_STOPS)] | None
FormatName = Annotated[
    str,
    AfterValidator(lambda name: get_format(name).name),
    WithJsonSchema({"type": "string", "enum": list(FORMAT_NAMES)}),
]


class Body(BaseModel):
    """A request's body: no value is converted, no field is ignored."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(Body):
    """How a stream tells the number of tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RowsBody(Body):
    """Which routed experts are handed out, and in which form."""

    return_routed_experts: bool | None = Field(
        default=None, description="hand out the routed experts; unset does as the server was told"
    )
    routed_experts_format: FormatName = "vllm"
    routed_experts_prompt_start: int = Field(
        default=0, ge=0, description="position of the first row handed out"
    )


class OpenAIBody(RowsBody):
    """Fields that completions and chat completions share."""

    model: str | None = None
    request_id: Name | None = None
    cache_salt: Salt | None = None
    n: int | None = Field(default=1, ge=1)
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Stop = None
    stop_token_ids: StopTokenIds = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Off = None
    presence_penalty: Zero = None
    frequency_penalty: Zero = None
    repetition_penalty: One = None
    length_penalty: One = None
    min_tokens: Zero = None
    logit_bias: Empty = None
    bad_words: NoItems = None
    allowed_token_ids: None = None
    use_beam_search: Off = None
    truncate_prompt_tokens: None = None
    prompt_logprobs: None = None
    return_tokens_as_token_ids: Off = None
    response_format: None = None
    structured_outputs: None = None
    priority: Zero = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    vllm_xargs: Empty = None
