"""A client of a routebook server, or of one that speaks vLLM's `/inference/v1/generate`, for code without `await`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from routebook.client.assembly import Request
from routebook.client.calls import Call, Calls, Messages, Prompt, Send, should_abort
from routebook.client.config import ClientConfig
from routebook.client.event_reader import EventReader
from routebook.client.outputs import Generation, GenerationChunk
from routebook.client.retry import Outcome
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import RoutebookError, UnreachableError
from routebook.routes import RouteSchema

ABORT_TIMEOUT = 5.0
"""Seconds that telling a server to stop may take."""

_Result = TypeVar("_Result")


class GenerationStream:
    """Deltas of one generation; a context manager, whose end before the stream's aborts the generation."""

    def __init__(
        self, response: httpx.Response, request: Request, abort: Callable[[Sequence[str]], None]
    ) -> None:
        self._response = response
        self._reader = EventReader(request)
        self._abort = abort

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._response.close()
        if not self._reader.is_done:
            self._abort(self._reader.request_ids)

    def __iter__(self) -> Iterator[GenerationChunk]:
        """The deltas as they arrive.

        Raises:
            UnreachableError: the stream broke off.
            RoutebookError: what :meth:`Client.generate` raises of an answer.
        """
        try:
            for piece in self._response.iter_raw():
                yield from self._reader.feed(piece)
        except httpx.TransportError as error:
            raise UnreachableError(f"the stream broke off: {error!r}") from error
        self._reader.check_done()

    def result(self) -> Generation:
        """The whole generation; reads what was not read yet."""
        if not self._reader.is_done:
            for _ in self:
                pass
        return self._reader.result()


class Client:
    """Generates over HTTP and gives back the routed experts of every token.

    May be used as a context manager, and by several threads at once.

    Args:
        base_url: address of the server, such as `http://localhost:8000`.
        schema: layers, experts and top-k of the model, for forms of rows that do not tell them; without it the server
            is asked when it is needed.
        transport: another way to reach it than sockets, for tests.
        config: options of :class:`ClientConfig`: `api_key`, `routed_experts_format`, `timeout`, ...

    Raises:
        ConfigError: an option that cannot work.
    """

    def __init__(
        self,
        base_url: str,
        *,
        schema: RouteSchema | None = None,
        transport: httpx.BaseTransport | None = None,
        **config: Any,
    ) -> None:
        self.config = ClientConfig.from_options(base_url=base_url, **config)
        self._calls = Calls(self.config, schema)
        limits = httpx.Limits(max_connections=self.config.max_connections)
        self._http = httpx.Client(transport=transport, limits=limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def generate(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Generation:
        """Complete a prompt.

        Sent again only if it surely was not started: the connection was refused, or the server answered 429 or 503.
        A generation that is interrupted here is aborted at the server.

        Args:
            prompt: a text, token ids, or messages of a conversation.
            params: as for :class:`routebook.LLM`; rows are handed out unless `routed_experts` is False.
            request_id: what the server's log calls it; unset draws one.

        Raises:
            RequestError: the server refused the request.
            UnreachableError: the server was not reached, or went away.
            ServerError: it answered with an error, or without what was asked for.
            FormatError: its answer is damaged.
            RecordError: rows are missing, came twice, or belong to other tokens.
        """
        request = self._run(self._calls.prepare(prompt, params or SamplingParams(), request_id))
        return self._run_or_abort(request, self._calls.generate(request))

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> GenerationStream:
        """Complete a prompt, delta by delta; use it in a `with` block. Arguments and errors as :meth:`generate`."""
        request = self._run(self._calls.prepare(prompt, params or SamplingParams(), request_id))
        response = self._run_or_abort(request, self._calls.open_stream(request))
        return GenerationStream(response, request, self._abort_quietly)

    def tokenize(self, prompt: str | Messages) -> tuple[int, ...]:
        """Token ids of a text, or of a conversation in the model's chat template."""
        return self._run(self._calls.tokenize(prompt))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        return self._run(self._calls.detokenize(token_ids))

    def schema(self) -> RouteSchema:
        """Layers, experts and top-k of the model."""
        return self._run(self._calls.schema())

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with what they have; ids that are not running are passed over."""
        self._run(self._calls.abort(request_ids))

    def _run_or_abort(self, request: Request, call: Call[_Result]) -> _Result:
        try:
            return self._run(call)
        except BaseException as error:
            if should_abort(error):
                self._abort_quietly([request.request_id])
            raise

    def _run(self, call: Call[_Result]) -> _Result:
        outcome: Outcome | None = None
        try:
            while True:
                step = call.send(outcome)
                outcome = None
                if isinstance(step, Send):
                    outcome = self._send(step)
                else:
                    time.sleep(step.seconds)
        except StopIteration as end:
            result: _Result = end.value
            return result

    def _send(self, step: Send) -> Outcome:
        try:
            response = self._http.send(step.request, stream=step.streams)
            if step.streams and response.status_code != 200:
                response.read()
        except httpx.TransportError as error:
            return error
        return response

    def _abort_quietly(self, request_ids: Sequence[str]) -> None:
        """Tell the server to stop; one that cannot be told has noticed that the connection is gone."""
        hurried = Calls(self.config.hurried(ABORT_TIMEOUT))
        try:
            self._run(hurried.abort(request_ids))
        except RoutebookError:
            return
