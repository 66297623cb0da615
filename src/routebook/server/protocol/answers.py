"""What answers look like, for the OpenAPI document; answers themselves are written without a detour by way of these."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class ErrorInfo(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(BaseModel):
    """An error, in the shape that OpenAI's clients read."""

    error: ErrorInfo


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class RowsChoice(BaseModel):
    """What one completion of any endpoint may have."""

    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    routed_experts: str | dict[str, Any] | None = Field(
        default=None, description="in the form that `routed_experts_format` names"
    )
    routed_experts_start: int | None = Field(default=None, description="position of the first row")
    routed_experts_error: str | None = Field(default=None, description="why there are no rows")


class CompletionChoice(RowsChoice):
    """One completion of a text."""

    text: str
    logprobs: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionAnswer(BaseModel):
    """Completions of one or several prompts."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class AssistantMessage(BaseModel):
    """What the model says."""

    role: str
    content: str


class ChatChoice(RowsChoice):
    """One way to go on with a conversation."""

    message: AssistantMessage
    logprobs: dict[str, Any] | None = None


class ChatAnswer(BaseModel):
    """Ways to go on with a conversation."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class GenerateChoice(RowsChoice):
    """One completion of token ids."""

    text: str | None = None
    logprobs: dict[str, Any] | None = None


class GenerateAnswer(BaseModel):
    """Completions of token ids."""

    request_id: str
    model: str
    created: int
    output_mode: str
    choices: list[GenerateChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class SGLangAnswer(BaseModel):
    """A completion, in SGLang's shape."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


class RouteSchemaCard(BaseModel):
    """What the axes of routed experts mean."""

    layer_ids: list[int]
    num_experts: int
    top_k: int
    num_hidden_layers: int


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int
    fingerprint: str
    route_schema: RouteSchemaCard


class ModelList(BaseModel):
    """The models that are served."""

    object: str
    data: list[ModelCard]


class TokenizeAnswer(BaseModel):
    """Token ids of a text."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeAnswer(BaseModel):
    """Text of token ids."""

    prompt: str


class StatusAnswer(BaseModel):
    """What was done."""

    status: str


class WeightsAnswer(StatusAnswer):
    """Weights were replaced."""

    weight_version: int
