"""What endpoints share."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import Request

from routebook.errors import RequestError
from routebook.routes.formats import FRAME_MEDIA_TYPE, get_format
from routebook.server.http_errors import NotAcceptableError
from routebook.server.job import Job, JobPrompt
from routebook.server.protocol.answers import ErrorAnswer
from routebook.server.protocol.base import OpenAIBody, RowsBody, StreamOptions
from routebook.server.protocol.generate import GenerateRequest, GenerateSamplingParams
from routebook.server.protocol.sglang import SGLangSamplingParams
from routebook.server.rows import RowsField
from routebook.server.serving import Serving, new_name

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request cannot be served as asked"},
    "5XX": {"model": ErrorAnswer, "description": "The engine has failed"},
}

_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
    "description": "JSON in `data`; the last event is `[DONE]`",
}
_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "min_p",
    "ignore_eos",
    "skip_special_tokens",
)
_FRAMES = {"type": "string", "format": "binary", "description": "a `.routes` file"}


def _serving(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving


Served = Annotated[Serving, Depends(_serving)]


def ok(model: Any) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's description of an answer with completions, in JSON and in other forms."""
    content = {"text/event-stream": {"schema": _EVENT}, FRAME_MEDIA_TYPE: {"schema": _FRAMES}}
    return {200: {"model": model, "content": content, "description": "Done"}, **ERRORS}


def wants_frames(request: Request, stream: bool) -> bool:
    """Whether the client asks for binary frames instead of JSON.

    Raises:
        NotAcceptableError: it asks for a stream of events as well.
    """
    accepted = [kind.split(";")[0].strip() for kind in request.headers.get("accept", "").split(",")]
    if FRAME_MEDIA_TYPE not in accepted:
        return False
    if stream:
        raise NotAcceptableError(
            f"stream=true answers with events, which {FRAME_MEDIA_TYPE} cannot carry; set"
            " stream=false, or accept text/event-stream and set routed_experts_format='frame'"
        )
    return True


def wants_rows(serving: Serving, asked: bool | None, frames: bool) -> bool:
    """Whether the answer has routed experts.

    Raises:
        RequestError: it is asked for in a form that is nothing but routed experts, without them.
    """
    if frames and asked is False:
        raise RequestError(
            f"return_routed_experts=false leaves nothing to write as {FRAME_MEDIA_TYPE}; accept JSON"
        )
    return frames or (serving.config.return_routed_experts if asked is None else asked)


def rows_field(body: RowsBody, stream: bool) -> RowsField:
    """How rows are written.

    Raises:
        RequestError: the format cannot be streamed.
    """
    route_format = get_format(body.routed_experts_format)
    if stream and not route_format.streams:
        raise RequestError(
            f"routed_experts_format={route_format.name!r} always holds a whole sequence; set stream=false, or"
            " choose another one"
        )
    return RowsField(route_format)


def openai_sampling(body: OpenAIBody) -> dict[str, Any]:
    """Sampling parameters of OpenAI's endpoints; what was not said is left out."""
    return common_sampling(body, seed=body.seed, include_stop_text=body.include_stop_str_in_output)


def common_sampling(
    body: OpenAIBody | GenerateSamplingParams | SGLangSamplingParams, **others: Any
) -> dict[str, Any]:
    """Sampling parameters that all endpoints call the same, and others; what was not said is left out."""
    given = {name: getattr(body, name) for name in _SAME_NAME} | others
    given["top_k"] = None if body.top_k == -1 else body.top_k
    given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    given["stop_token_ids"] = tuple(body.stop_token_ids or ())
    return {name: value for name, value in given.items() if value is not None}


def make_job(body: OpenAIBody | GenerateRequest, prompts: list[JobPrompt], *, frames: bool) -> Job:
    """The job of a request with vLLM's fields."""
    return Job(
        name=body.request_id or new_name(),
        prompts=prompts,
        cache_salt=body.cache_salt or "",
        stream=bool(body.stream),
        frames=frames,
        **stream_usage(body.stream_options),
    )


def stream_usage(options: StreamOptions | None) -> dict[str, bool]:
    """How a stream tells numbers of tokens."""
    if options is None:
        return {}
    return {
        "include_usage": bool(options.include_usage),
        "continuous_usage": bool(options.include_usage and options.continuous_usage_stats),
    }
