"""Rows out of answers that another client got, such as the `openai` package.

Ask with `extra_body={"return_routed_experts": True, "return_token_ids": True}`, and what comes back has all that is
needed but the schema; with `"routed_experts_format": "frame"` also that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from routebook.client.assembly import Assembly, Request
from routebook.client.outputs import Generation
from routebook.client.wire import WireAnswer
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import FormatError, RequestError
from routebook.routes import RouteSchema
from routebook.routes.formats import get_format


def read_openai(
    answer: Any,
    *,
    routed_experts_format: str = "vllm",
    routed_experts_prompt_start: int = 0,
    schema: RouteSchema | None = None,
) -> Generation:
    """The generation in a whole answer of `/v1/completions` or `/v1/chat/completions`.

    Args:
        answer: the JSON value, or an object of the `openai` package. All its completions are of one prompt.
        routed_experts_format: form of the rows, as it was asked for.
        routed_experts_prompt_start: position of the first row, as it was asked for.
        schema: layers, experts and top-k of the model; only `frame` does without.

    Raises:
        RequestError: no schema where one is needed.
        FormatError: no such answer, or one without token ids.
        ServerError: it has no rows.
        RecordError: rows are missing, or belong to other tokens.
    """
    fmt = get_format(routed_experts_format)
    if schema is None and fmt.name != "frame":
        raise RequestError(f"rows in format {fmt.name} do not tell their schema; pass schema=")
    value = answer.model_dump() if hasattr(answer, "model_dump") else answer
    if not isinstance(value, Mapping) or not value.get("choices"):
        raise FormatError("the answer has no choices")
    request = Request(
        request_id=str(value.get("id", "")),
        prompt_token_ids=_prompt_of(value),
        params=SamplingParams(
            n=len(value["choices"]), routed_experts_prompt_start=routed_experts_prompt_start
        ),
        has_text=True,
        format=fmt,
        schema=schema,
    )
    assembly = Assembly(request)
    assembly.add(_convert({"choices": [_plain_choice(choice) for choice in value["choices"]]}))
    return assembly.result()


def _prompt_of(value: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids of the prompt: chat tells them once, completions with every choice."""
    ids = [
        value.get("prompt_token_ids"),
        *(one.get("prompt_token_ids") for one in value["choices"]),
    ]
    told = {tuple(one) for one in ids if one is not None}
    if len(told) != 1:
        raise FormatError(
            f"the answer tells the token ids of {len(told)} prompts; ask with return_token_ids, and "
            "for one prompt at a time"
        )
    return told.pop()


def _plain_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    """The choice with what both endpoints have, its text always under `text`."""
    message = choice.get("message") or {}
    told = {"text": choice.get("text", message.get("content"))}
    names = (
        "index",
        "token_ids",
        "finish_reason",
        "stop_reason",
        "routed_experts",
        "routed_experts_start",
        "routed_experts_error",
    )
    return told | {name: choice.get(name) for name in names}


def _convert(value: Any) -> WireAnswer:
    try:
        return msgspec.convert(value, WireAnswer)
    except msgspec.ValidationError as error:
        raise FormatError(f"the answer is not what was expected: {error}") from error
