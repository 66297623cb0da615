"""The engine as the event loop sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from routebook.engine.engine import Engine, PauseMode
from routebook.engine.increments import Increment
from routebook.engine.outputs import RequestOutput
from routebook.errors import WorkerError
from routebook.server.engine_thread import Answer, Batch, EngineThread, Prompt
from routebook.server.http_errors import QueueFullError

T = TypeVar("T")
Converter = Callable[[list[Increment]], Any]
"""Makes what is sent out of increments."""


class EngineClient:
    """Submits prompts to an engine in another thread and waits for what they become.

    Made with :meth:`start`, in the event loop that uses it.

    Args:
        engine: the engine; only what never changes is read here.
        thread: its thread.
        max_queued: completions that may wait beyond those that run.
    """

    def __init__(self, engine: Engine, thread: EngineThread, max_queued: int) -> None:
        self.engine = engine
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._most_open = engine.config.scheduler.max_num_seqs + max_queued
        self.num_open = 0

    @classmethod
    async def start(
        cls, make_engine: Callable[[], Engine], *, max_queued: int = 1024, num_encoders: int = 2
    ) -> EngineClient:
        """Start an engine in a thread of its own.

        Args:
            make_engine: makes the engine.
            max_queued: completions that may wait beyond those that run.
            num_encoders: threads that encode what is answered.

        Raises:
            ModelError, ConfigError: the engine does not start.
        """
        loop = asyncio.get_running_loop()

        def deliver(batch: Batch) -> None:
            loop.call_soon_threadsafe(_deliver, batch)

        thread = EngineThread(make_engine, deliver, num_encoders)
        started = Answer(loop.create_future())
        thread.start_engine(started)
        return cls(await started.future, thread, max_queued)

    @property
    def is_alive(self) -> bool:
        """Whether the engine takes requests."""
        return self._thread.is_alive() and not self.engine.has_failed

    async def aclose(self) -> None:
        """Shut the engine down. What is open ends with an error."""
        self._thread.stop()
        await asyncio.to_thread(self._thread.join)

    async def generate(
        self, prompt: Prompt, convert: Callable[[RequestOutput], T] | None = None
    ) -> T:
        """Complete a prompt; a wait that is cancelled aborts it.

        Args:
            prompt: what to complete.
            convert: what is made of the output, in a thread of the pool; without it, the output comes back.

        Raises:
            RequestError: the prompt cannot be served.
            QueueFullError: too many wait already.
            WorkerError: the engine stands still.
        """
        whole = Answer(self._loop.create_future(), convert)
        with self._counted(prompt.params.n):
            try:
                await self._admit(prompt, whole)
                value: T = await whole.future
            except asyncio.CancelledError:
                self._forget(prompt)
                raise
        return value

    async def open_stream(
        self, prompt: Prompt, convert: Converter, *, in_pool: bool
    ) -> GenerationStream:
        """Begin to complete a prompt whose increments are read as they come; close what comes back.

        Args:
            prompt: what to complete.
            convert: what is made of increments.
            in_pool: make it in a thread of the pool, since it is more than a moment's work.

        Raises:
            RequestError, QueueFullError, WorkerError: as :meth:`generate`.
        """
        self._check_room(prompt.params.n)
        self.num_open += prompt.params.n
        stream = GenerationStream(self, prompt, convert, in_pool=in_pool)
        try:
            await self._admit(prompt, None)
        except BaseException:
            stream.close()
            raise
        return stream

    def abort(self, name: str) -> None:
        """End a prompt with what it has; unknown names are ignored."""
        self._submit(partial(self._thread.abort, name=name))

    async def pause(self, mode: PauseMode) -> None:
        """See :meth:`Engine.pause`."""
        await self._call(lambda engine: engine.pause(mode), when_idle=mode is PauseMode.WAIT)

    async def resume(self) -> None:
        """See :meth:`Engine.resume`."""
        await self._call(lambda engine: engine.resume())

    async def update_weights(self, source: str, mode: PauseMode) -> int:
        """See :meth:`Engine.update_weights`."""
        return await self._call(
            lambda engine: engine.update_weights(source, mode), when_idle=mode is PauseMode.WAIT
        )

    async def reset_prefix_cache(self) -> None:
        """See :meth:`Engine.reset_prefix_cache`."""
        await self._call(lambda engine: engine.reset_prefix_cache())

    async def check_integrity(self) -> None:
        """See :meth:`Engine.check_integrity`."""
        await self._call(lambda engine: engine.check_integrity())

    async def _admit(self, prompt: Prompt, whole: Answer | None) -> None:
        admitted = Answer(self._loop.create_future())
        self._submit(partial(self._thread.add, prompt=prompt, whole=whole, admitted=admitted))
        await admitted.future

    async def _read(
        self, prompt: Prompt, convert: Callable[[list[Increment]], T], *, in_pool: bool
    ) -> T:
        answer = Answer(self._loop.create_future(), convert if in_pool else None)
        self._submit(partial(self._thread.read, key=prompt.key, news=answer))
        news = await answer.future
        value: T = news if in_pool else convert(news)
        return value

    def _leave(self, prompt: Prompt) -> None:
        self.num_open -= prompt.params.n
        self._forget(prompt)

    def _forget(self, prompt: Prompt) -> None:
        if self._thread.is_alive():
            self._submit(partial(self._thread.forget, key=prompt.key))

    async def _call(self, function: Callable[[Engine], T], *, when_idle: bool = False) -> T:
        answer = Answer(self._loop.create_future())
        call = self._thread.call_when_idle if when_idle else self._thread.call
        self._submit(partial(call, function=function, answer=answer))
        value: T = await answer.future
        return value

    def _submit(self, command: Callable[[Engine], None]) -> None:
        if not self._thread.is_alive():
            raise WorkerError("the engine has ended")
        self._thread.submit(command)

    def _check_room(self, num_completions: int) -> None:
        if self.num_open + num_completions > self._most_open:
            raise QueueFullError(
                f"{self.num_open} completions are open, and {num_completions} more would exceed"
                f" {self._most_open}; try again later"
            )

    @contextmanager
    def _counted(self, num_completions: int) -> Iterator[None]:
        self._check_room(num_completions)
        self.num_open += num_completions
        try:
            yield
        finally:
            self.num_open -= num_completions


class GenerationStream:
    """The increments of one prompt, as often as they are asked for: who reads slowly gets fewer and larger ones.

    Args:
        client: whose it is.
        prompt: what is completed.
        convert: what is made of increments.
        in_pool: make it in a thread of the pool instead of the event loop.
    """

    def __init__(
        self, client: EngineClient, prompt: Prompt, convert: Converter, *, in_pool: bool
    ) -> None:
        self._client = client
        self._prompt = prompt
        self._convert = convert
        self._in_pool = in_pool
        self._is_closed = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        """What `convert` makes of each bunch of increments, until all completions have ended."""
        num_open = self._prompt.params.n
        while num_open:
            num_ended, value = await self._client._read(
                self._prompt, self._convert_counting, in_pool=self._in_pool
            )
            num_open -= num_ended
            yield value

    def close(self) -> None:
        """Abort what is not over; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._client._leave(self._prompt)

    def _convert_counting(self, increments: list[Increment]) -> tuple[int, Any]:
        num_ended = sum(increment.finish_reason is not None for increment in increments)
        return num_ended, self._convert(increments)


def _deliver(batch: Batch) -> None:
    """Give values to those who still wait for them; in the event loop."""
    for answer, value in batch:
        if answer.future.done():
            continue
        if isinstance(value, BaseException):
            answer.future.set_exception(value)
        else:
            answer.future.set_result(value)
