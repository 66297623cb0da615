"""What a client does, without doing it: each call is a generator that says what to send, and is told what came back.

So there is one text of every call, and two short ones that carry calls out, with and without `await`.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec

from routebook.client.assembly import Assembly, Request
from routebook.client.config import ClientConfig
from routebook.client.frames import read_generation
from routebook.client.outputs import Generation
from routebook.client.retry import Outcome, RetryPolicy, is_safe
from routebook.client.wire import (
    WireAnswer,
    WireError,
    WireModels,
    WireText,
    WireTokens,
    parse,
    sampling_fields,
)
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import (
    RecordError,
    RequestError,
    RoutebookError,
    ServerError,
    UnreachableError,
)
from routebook.routes import RouteSchema
from routebook.routes.formats import FRAME_MEDIA_TYPE, get_format
from routebook.routes.token_hash import as_token_ids

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]

_JSON = "application/json"
_CALLERS_MISTAKE = frozenset({400, 404, 406, 413, 422})
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Send:
    """Send this and tell what came of it; a body that `streams` is left unread if its status is 200."""

    request: httpx.Request
    streams: bool = False


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait so many seconds."""

    seconds: float


Step = Send | Sleep
Call = Generator[Step, Outcome | None, _Result]


class Calls:
    """The calls of one client.

    Args:
        config: which server, and how patient to be.
        schema: layers, experts and top-k of the model; without it the server is asked when it is needed.
    """

    def __init__(self, config: ClientConfig, schema: RouteSchema | None = None) -> None:
        self.config = config
        self._policy = RetryPolicy(config.max_retries, config.max_retry_wait)
        self._schema = schema
        self._timeout = httpx.Timeout(config.timeout, connect=config.connect_timeout)

    def generate(self, request: Request) -> Call[Generation]:
        """Send a request and take its whole answer."""
        accept = _JSON
        if request.params.routed_experts and request.format.name == "frame":
            accept = f"{FRAME_MEDIA_TYPE}, {_JSON}"
        response = yield from self._post(
            "/inference/v1/generate", self._body(request, stream=False), accept=accept
        )
        if response.headers.get("content-type", "").startswith(FRAME_MEDIA_TYPE):
            return read_generation(request, response.content)
        assembly = Assembly(request)
        assembly.add(parse(response.content, WireAnswer))
        return assembly.result()

    def open_stream(self, request: Request) -> Call[httpx.Response]:
        """Send a request and leave its answer to be read event by event."""
        body = self._body(request, stream=True)
        response = yield from self._post(
            "/inference/v1/generate", body, accept="text/event-stream", streams=True
        )
        return response

    def prepare(
        self, prompt: Prompt | Messages, params: SamplingParams, request_id: str | None
    ) -> Call[Request]:
        """Find out all that a request says: token ids of its prompt, and the schema if it needs one."""
        token_ids, has_text = yield from self._tokens_of(prompt)
        first = params.routed_experts_prompt_start
        if not 0 <= first <= len(token_ids):
            raise RequestError(
                f"routed_experts_prompt_start={first} lies outside the prompt's {len(token_ids)} tokens"
            )
        schema = self._schema
        if params.routed_experts and self.config.routed_experts_format != "frame":
            schema = yield from self.schema()
        return Request(
            request_id=request_id or secrets.token_hex(16),
            prompt_token_ids=token_ids,
            params=params,
            has_text=has_text,
            format=get_format(self.config.routed_experts_format),
            schema=schema,
        )

    def tokenize(self, prompt: str | Messages) -> Call[tuple[int, ...]]:
        """Token ids of a text, or of a conversation in the model's chat template."""
        if isinstance(prompt, str):
            body: dict[str, Any] = {"prompt": prompt}
        else:
            body = {"messages": list(prompt), "add_generation_prompt": True}
        response = yield from self._post("/tokenize", self._with_model(body))
        token_ids: tuple[int, ...] = parse(response.content, WireTokens).tokens
        return token_ids

    def detokenize(self, token_ids: Sequence[int]) -> Call[str]:
        """Text of token ids."""
        body = self._with_model({"tokens": [int(token) for token in token_ids]})
        response = yield from self._post("/detokenize", body)
        text: str = parse(response.content, WireText).prompt
        return text

    def schema(self) -> Call[RouteSchema]:
        """Layers, experts and top-k of the model, asked once."""
        if self._schema is None:
            response = yield from self._send("GET", "/v1/models")
            models = parse(response.content, WireModels).data
            wanted = [one for one in models if self.config.model in (None, one.id)]
            if not wanted or wanted[0].route_schema is None:
                raise ServerError(
                    f"the server does not tell the schema of {self.config.model or 'its model'}; "
                    "pass schema=RouteSchema(...), or routed_experts_format='frame'"
                )
            self._schema = wanted[0].route_schema.schema()
        return self._schema

    def abort(self, request_ids: Sequence[str]) -> Call[None]:
        """End requests with what they have."""
        body = {"request_ids": list(request_ids)}
        yield from self._post("/inference/v1/abort_requests", body)

    def _tokens_of(self, prompt: Prompt | Messages) -> Call[tuple[tuple[int, ...], bool]]:
        """The prompt's token ids, and whether the caller deals in text."""
        if isinstance(prompt, str) or _is_conversation(prompt):
            token_ids = yield from self.tokenize(prompt)  # type: ignore[arg-type]
            return token_ids, True
        try:
            return tuple(as_token_ids(prompt).tolist()), False  # type: ignore[arg-type]
        except RecordError as error:
            raise RequestError(
                f"a prompt is a text, token ids or messages, not {prompt!r:.80}: {error}"
            ) from error

    def _body(self, request: Request, *, stream: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "request_id": request.request_id,
            "token_ids": request.prompt_token_ids,
            "sampling_params": sampling_fields(request.params),
            "stream": stream,
            "output_mode": "text" if request.has_text else "tokens",
            "return_routed_experts": request.params.routed_experts,
        }
        if request.params.routed_experts:
            body["routed_experts_format"] = request.format.name
        return self._with_model(body)

    def _with_model(self, body: dict[str, Any]) -> dict[str, Any]:
        return body if self.config.model is None else {**body, "model": self.config.model}

    def _post(
        self, path: str, body: dict[str, Any], *, accept: str = _JSON, streams: bool = False
    ) -> Call[httpx.Response]:
        content = msgspec.json.encode(body)
        response = yield from self._send(
            "POST", path, content=content, accept=accept, streams=streams
        )
        return response

    def _send(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        accept: str = _JSON,
        streams: bool = False,
    ) -> Call[httpx.Response]:
        """Send until there is an answer, or trying again is not safe or not worth it."""
        attempt = 0
        while True:
            attempt += 1
            request = self._request(method, path, content, accept)
            outcome = yield Send(request, streams)
            assert outcome is not None
            if isinstance(outcome, httpx.Response) and outcome.status_code == 200:
                return outcome
            wait = self._policy.wait(attempt, outcome)
            if wait is None:
                raise self._error(outcome, attempt)
            yield Sleep(wait)

    def _request(self, method: str, path: str, content: bytes | None, accept: str) -> httpx.Request:
        headers = {"accept": accept, "accept-encoding": "identity"}
        if content is not None:
            headers["content-type"] = _JSON
        if self.config.api_key is not None:
            headers["authorization"] = f"Bearer {self.config.api_key}"
        url = self.config.base_url.rstrip("/") + path
        return httpx.Request(
            method,
            url,
            headers=headers,
            content=content,
            extensions={"timeout": self._timeout.as_dict()},
        )

    def _error(self, outcome: Outcome, attempts: int) -> RoutebookError:
        tried = f" (tried {attempts} times)" if attempts > 1 else ""
        if not isinstance(outcome, httpx.Response):
            what = str(outcome) or type(outcome).__name__
            if is_safe(outcome):
                return UnreachableError(f"{self.config.base_url} cannot be reached: {what}{tried}")
            return UnreachableError(
                f"{self.config.base_url} went away before its answer was there: {what}; the request "
                "may have run, so it was not sent again"
            )
        status, reason = outcome.status_code, error_text(outcome)
        if status in _CALLERS_MISTAKE:
            return RequestError(f"the server refused the request: {reason}")
        return ServerError(f"the server answered {status}: {reason}{tried}", status)


def _is_conversation(prompt: Any) -> bool:
    is_list = isinstance(prompt, Sequence) and bool(prompt)
    return is_list and isinstance(prompt[0], Mapping)


def error_text(response: httpx.Response) -> str:
    """What the body of an error says, in OpenAI's form or as it is."""
    try:
        error: WireError | None = msgspec.json.decode(response.content, type=WireAnswer).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        error = None
    return error.message if error else response.text[:500] or response.reason_phrase


def should_abort(error: BaseException) -> bool:
    """Whether a request that ended for its client in this way may still run at the server."""
    return not isinstance(error, RoutebookError) or isinstance(error, UnreachableError)
