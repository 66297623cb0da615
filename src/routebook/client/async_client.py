"""The client for code with `await`; all that it does is told in :mod:`routebook.client.calls`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import httpx

from routebook.client.assembly import Request
from routebook.client.calls import Call, Calls, Messages, Prompt, Send, should_abort
from routebook.client.client import ABORT_TIMEOUT
from routebook.client.config import ClientConfig
from routebook.client.event_reader import EventReader
from routebook.client.outputs import Generation, GenerationChunk
from routebook.client.retry import Outcome
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import RoutebookError, UnreachableError
from routebook.routes import RouteSchema

_Result = TypeVar("_Result")


class AsyncGenerationStream:
    """Deltas of one generation; a context manager, whose end before the stream's aborts the generation."""

    def __init__(
        self,
        open_stream: Callable[[], Awaitable[tuple[httpx.Response, Request]]],
        abort: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        self._open_stream = open_stream
        self._abort = abort
        self._response: httpx.Response
        self._reader: EventReader

    async def __aenter__(self) -> Self:
        self._response, request = await self._open_stream()
        self._reader = EventReader(request)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self._response.aclose()
        if not self._reader.is_done:
            await self._abort(self._reader.request_ids)

    async def __aiter__(self) -> AsyncIterator[GenerationChunk]:
        """The deltas as they arrive.

        Raises:
            UnreachableError: the stream broke off.
            RoutebookError: what :meth:`AsyncClient.generate` raises of an answer.
        """
        try:
            async for piece in self._response.aiter_raw():
                for chunk in self._reader.feed(piece):
                    yield chunk
        except httpx.TransportError as error:
            raise UnreachableError(f"the stream broke off: {error!r}") from error
        self._reader.check_done()

    async def result(self) -> Generation:
        """The whole generation; reads what was not read yet."""
        if not self._reader.is_done:
            async for _ in self:
                pass
        return self._reader.result()


class AsyncClient:
    """Generates over HTTP and gives back the routed experts of every token; see :class:`routebook.Client`.

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
        transport: httpx.AsyncBaseTransport | None = None,
        **config: Any,
    ) -> None:
        self.config = ClientConfig.from_options(base_url=base_url, **config)
        self._calls = Calls(self.config, schema)
        limits = httpx.Limits(max_connections=self.config.max_connections)
        self._http = httpx.AsyncClient(transport=transport, limits=limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def generate(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Generation:
        """Complete a prompt. Arguments, errors and what is sent again: as :meth:`routebook.Client.generate`.

        Cancelled, it aborts the generation at the server.
        """
        prepare = self._calls.prepare(prompt, params or SamplingParams(), request_id)
        request = await self._run(prepare)
        return await self._run_or_abort(request, self._calls.generate(request))

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> AsyncGenerationStream:
        """Complete a prompt, delta by delta; use it in an `async with` block."""

        async def open_stream() -> tuple[httpx.Response, Request]:
            prepare = self._calls.prepare(prompt, params or SamplingParams(), request_id)
            request = await self._run(prepare)
            response = await self._run_or_abort(request, self._calls.open_stream(request))
            return response, request

        return AsyncGenerationStream(open_stream, self._abort_quietly)

    async def tokenize(self, prompt: str | Messages) -> tuple[int, ...]:
        """Token ids of a text, or of a conversation in the model's chat template."""
        return await self._run(self._calls.tokenize(prompt))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        return await self._run(self._calls.detokenize(token_ids))

    async def schema(self) -> RouteSchema:
        """Layers, experts and top-k of the model."""
        return await self._run(self._calls.schema())

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with what they have; ids that are not running are passed over."""
        await self._run(self._calls.abort(request_ids))

    async def _run_or_abort(self, request: Request, call: Call[_Result]) -> _Result:
        try:
            return await self._run(call)
        except BaseException as error:
            if should_abort(error):
                await self._abort_quietly([request.request_id])
            raise

    async def _run(self, call: Call[_Result]) -> _Result:
        outcome: Outcome | None = None
        try:
            while True:
                step = call.send(outcome)
                outcome = None
                if isinstance(step, Send):
                    outcome = await self._send(step)
                else:
                    await anyio.sleep(step.seconds)
        except StopIteration as end:
            result: _Result = end.value
            return result

    async def _send(self, step: Send) -> Outcome:
        try:
            response = await self._http.send(step.request, stream=step.streams)
            if step.streams and response.status_code != 200:
                await response.aread()
        except httpx.TransportError as error:
            return error
        return response

    async def _abort_quietly(self, request_ids: Sequence[str]) -> None:
        """Tell the server to stop; one that cannot be told has noticed that the connection is gone."""
        hurried = Calls(self.config.hurried(ABORT_TIMEOUT))
        with anyio.CancelScope(shield=True):
            try:
                await self._run(hurried.abort(request_ids))
            except RoutebookError:
                return
