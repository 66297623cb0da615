"""JSON that the server sends and gets, as far as the client looks at it."""

from __future__ import annotations

from typing import Any

import msgspec

from routebook.engine.sampling_params import SamplingParams
from routebook.errors import FormatError
from routebook.routes import RouteSchema


class WireError(msgspec.Struct, frozen=True):
    """What is wrong, in OpenAI's form."""

    message: str


class WireChoice(msgspec.Struct, frozen=True):
    """A completion, or what became known of it."""

    index: int
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: dict[str, Any] | None = None
    routed_experts: Any = None
    routed_experts_start: int | None = None
    routed_experts_error: str | None = None


class WireAnswer(msgspec.Struct, frozen=True):
    """An answer, or one event of a stream of them."""

    request_id: str = ""
    choices: tuple[WireChoice, ...] = ()
    error: WireError | None = None


class WireTokens(msgspec.Struct, frozen=True):
    """Answer of `/tokenize`."""

    tokens: tuple[int, ...]


class WireText(msgspec.Struct, frozen=True):
    """Answer of `/detokenize`."""

    prompt: str


class WireSchema(msgspec.Struct, frozen=True):
    """A route schema."""

    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    num_hidden_layers: int

    def schema(self) -> RouteSchema:
        """The same as the record's type."""
        return RouteSchema(
            layer_ids=self.layer_ids,
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_hidden_layers=self.num_hidden_layers,
        )


class WireModel(msgspec.Struct, frozen=True):
    """A model that a server has."""

    id: str
    route_schema: WireSchema | None = None


class WireModels(msgspec.Struct, frozen=True):
    """Answer of `/v1/models`."""

    data: tuple[WireModel, ...]


def parse(data: bytes, kind: Any) -> Any:
    """Read JSON as a value of a type.

    Raises:
        FormatError: it is something else.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FormatError(f"the server's answer is not what was expected: {error}") from error


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """The fields of `sampling_params`; what is unset is left out."""
    fields = {
        "n": params.n,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "seed": params.seed,
        "stop": list(params.stop) or None,
        "stop_token_ids": list(params.stop_token_ids) or None,
        "ignore_eos": params.ignore_eos,
        "logprobs": params.logprobs,
        "routed_experts_prompt_start": params.routed_experts_prompt_start or None,
    }
    return {name: value for name, value in fields.items() if value is not None}
