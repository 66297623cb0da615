"""What all endpoints need: the engine, the tokenizer, and the way from a job to its answer."""

from __future__ import annotations

import asyncio
import copy
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from routebook.engine.increments import Increment
from routebook.engine.outputs import CompletionOutput, RequestOutput
from routebook.engine.request import FinishReason
from routebook.engine.served_model import ServedModel
from routebook.errors import RequestError, RoutebookError
from routebook.routes.formats import FRAME_MEDIA_TYPE
from routebook.server.config import ServerConfig
from routebook.server.disconnect import until_disconnect
from routebook.server.engine_client import EngineClient, GenerationStream
from routebook.server.forms.base import Form
from routebook.server.frames import choice_frame
from routebook.server.http_errors import (
    GenerationFailedError,
    NotFoundError,
    error_body,
    status_of,
)
from routebook.server.job import Job
from routebook.server.json_body import LAST_EVENT, Spliced, encode_json, server_sent_event
from routebook.server.metrics import Metrics
from routebook.server.responses import EventStream, PiecesResponse
from routebook.server.token_texts import TokenTexts

T = TypeVar("T")


class Serving:
    """The state of one application.

    Args:
        client: the engine.
        config: options of the server.
        chat_template: replaces the tokenizer's.
    """

    def __init__(
        self, client: EngineClient, config: ServerConfig, chat_template: str | None = None
    ) -> None:
        self.client = client
        self.config = config
        self.engine = client.engine
        self.model_name = config.served_model_name or self.engine.served.name
        # The engine's own may be used by its thread at the same time.
        self.tokenizer = copy.deepcopy(self.engine.tokenizer)
        self.chat_template = chat_template or getattr(self.tokenizer, "chat_template", None)
        self.texts = TokenTexts(self.tokenizer)
        self.metrics = Metrics(client, self.model_name)
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="routebook-tokenizer")
        self._jobs: dict[str, Job] = {}
        self.started = int(time.time())

    async def aclose(self) -> None:
        """Shut down."""
        await self.client.aclose()
        self._tokenizing.shutdown()

    def check_model(self, model: str | None) -> None:
        """Refuse requests for another model.

        Raises:
            NotFoundError: the name is not that of the model.
        """
        if model is not None and model != self.model_name:
            raise NotFoundError(
                f"the model {model!r} is not served here; ask for {self.model_name!r}", "model"
            )

    async def tokenizing(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run a function that uses the tokenizer, beside the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizing, partial(function, *args, **options))

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            RequestError: the model has no tokenizer.
        """
        tokenizer = self.require_tokenizer()
        token_ids: list[int] = await self.tokenizing(
            tokenizer.encode, text, add_special_tokens=add_special_tokens
        )
        return token_ids

    def require_tokenizer(self) -> Any:
        """The tokenizer.

        Raises:
            RequestError: the model has none.
        """
        if self.tokenizer is None:
            raise RequestError(
                "the model has no tokenizer; send token ids to /inference/v1/generate"
            )
        return self.tokenizer

    def most_new_tokens(self, num_prompt_tokens: int) -> int:
        """How many tokens can follow a prompt; at least 1, so that a too long prompt is refused as such."""
        return max(1, self.engine.max_model_len - num_prompt_tokens)

    async def answer(self, request: Request, job: Job, form: Form) -> Response:
        """Do a job. A client that goes away meanwhile aborts it.

        Raises:
            RequestError: a prompt cannot be served; nothing runs.
            QueueFullError: too much waits already; nothing runs.
            WorkerError: the engine stands still.
        """
        if job.stream:
            return await self._stream(job, form)
        if job.frames:
            return await until_disconnect(request, self._frames(job, form))
        return await until_disconnect(request, self._whole(job, form))

    def abort(self, name: str) -> None:
        """End a request with what it has; unknown names are ignored."""
        job = self._jobs.get(name)
        for index in range(len(job.prompts) if job is not None else 0):
            self.client.abort(self._jobs[name].prompt_name(index))

    async def _whole(self, job: Job, form: Form) -> Response:
        made = await self._generate(job, form, partial(_whole_choices, form))
        value = form.answer([choice for choices in made for choice in choices])
        return PiecesResponse(encode_json(value), "application/json")

    async def _frames(self, job: Job, form: Form) -> Response:
        served = self.engine.served
        made = await self._generate(job, form, partial(_choice_frames, form, served))
        frames = [frame for frames in made for frame in frames]
        return PiecesResponse(frames, FRAME_MEDIA_TYPE)

    async def _generate(
        self, job: Job, form: Form, make: Callable[[int, RequestOutput], list[T]]
    ) -> list[list[T]]:
        """What `make` makes of each prompt's output; when one of them fails, the others are aborted."""
        with self._known(job), self.metrics.generating(job) as measured:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._generate_one(job, index, make))
                        for index in range(len(job.prompts))
                    ]
            except* RoutebookError as errors:
                raise first_error(errors) from None
            measured.end(form)
            return [task.result() for task in tasks]

    async def _generate_one(
        self, job: Job, index: int, make: Callable[[int, RequestOutput], list[T]]
    ) -> list[T]:
        def convert(output: RequestOutput) -> list[T]:
            for choice in output.choices:
                _refuse_error(choice)
            return make(index, output)

        if job.is_laborious:
            return await self.client.generate(job.engine_prompt(index), convert)
        output: RequestOutput = await self.client.generate(job.engine_prompt(index))
        return convert(output)

    @contextmanager
    def _known(self, job: Job) -> Iterator[None]:
        """While it lasts, the job can be aborted by its name."""
        self._enter(job)
        try:
            yield
        finally:
            del self._jobs[job.name]

    def _enter(self, job: Job) -> None:
        if job.name in self._jobs:
            raise RequestError(f"request_id={job.name!r} is that of an open request already")
        self._jobs[job.name] = job

    def _leave(self, job: Job, streams: list[GenerationStream]) -> None:
        del self._jobs[job.name]
        for stream in streams:
            stream.close()

    async def _stream(self, job: Job, form: Form) -> Response:
        streams: list[GenerationStream] = []
        self._enter(job)
        try:
            for index in range(len(job.prompts)):
                stream = await self.client.open_stream(
                    job.engine_prompt(index),
                    partial(_events, form, index),
                    in_pool=job.is_laborious,
                )
                streams.append(stream)
        except BaseException:
            self._leave(job, streams)
            raise
        events = self._events(job, form, streams)
        return EventStream(events, partial(self._leave, job, streams))

    async def _events(
        self, job: Job, form: Form, streams: list[GenerationStream]
    ) -> AsyncGenerator[list[bytes], None]:
        with self.metrics.generating(job) as measured:
            try:
                async for events in merged(streams):
                    measured.first()
                    yield events
                measured.end(form)
                last = form.last_event()
                if last is not None:
                    yield server_sent_event(last)
            except RoutebookError as error:
                status = status_of(error)
                yield server_sent_event(error_body(status, str(error)))
        yield LAST_EVENT


def new_name(prefix: str = "") -> str:
    """A name for a request that has none."""
    return prefix + secrets.token_hex(16)


def first_error(errors: BaseExceptionGroup[RoutebookError]) -> RoutebookError:
    """One of the errors of a group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RoutebookError)
    return error


async def merged(streams: list[GenerationStream]) -> AsyncIterator[list[bytes]]:
    """What comes from several streams, as it comes. No stream is read further than what was taken of it."""
    if len(streams) == 1:
        async for events in streams[0]:
            yield events
        return
    iterators = [aiter(stream) for stream in streams]
    tasks: dict[asyncio.Task[list[bytes]], AsyncIterator[list[bytes]]] = {
        asyncio.ensure_future(anext(it)): it for it in iterators
    }
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                iterator = tasks.pop(task)
                if isinstance(task.exception(), StopAsyncIteration):
                    continue
                yield task.result()
                tasks[asyncio.ensure_future(anext(iterator))] = iterator
    finally:
        for task in tasks:
            task.cancel()


def _whole_choices(form: Form, prompt_index: int, output: RequestOutput) -> list[Spliced]:
    return [Spliced(encode_json(form.choice(prompt_index, choice))) for choice in output.choices]


def _choice_frames(
    form: Form, served: ServedModel, prompt_index: int, output: RequestOutput
) -> list[bytes]:
    return [
        choice_frame(form, form.count(prompt_index, choice), served, output, choice)
        for choice in output.choices
    ]


def _events(form: Form, prompt_index: int, increments: list[Increment]) -> list[bytes]:
    for increment in increments:
        _refuse_error(increment)
    return [
        piece
        for increment in increments
        for piece in server_sent_event(form.event(prompt_index, increment))
    ]


def _refuse_error(part: CompletionOutput | Increment) -> None:
    if part.finish_reason is FinishReason.ERROR:
        raise GenerationFailedError(str(part.stop_reason))
