"""The thread that owns the engine.

Everything that touches the engine runs here, as a command taken from a queue between two steps. Results leave once
per step, as one batch: plain ones go straight to the event loop, those with work left to do on them (rows to encode)
by way of a pool of threads, so that neither the engine nor the event loop does that work.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

from routebook.engine.engine import Engine
from routebook.engine.outputs import RequestOutput
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import RequestError, RoutebookError, WorkerError

Command = Callable[[Engine], None]
Batch = list[tuple["Answer", Any]]
Deliver = Callable[[Batch], None]
"""Takes answers with their values or errors; called in any thread."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A place that waits for one value."""

    future: Any
    """Belongs to the event loop; only `Deliver` touches it."""
    convert: Callable[[Any], Any] | None = None
    """What is done to the value in a thread of the pool before it is delivered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What is to be generated."""

    name: str
    """By which its caller knows it; no two open prompts have the same."""
    token_ids: list[int]
    params: SamplingParams
    text: str | None = None
    cache_salt: str = ""
    key: int = field(default_factory=count().__next__)
    """Tells it from all other prompts, also from those of the same name."""


@dataclass(slots=True)
class _Open:
    """A prompt that the engine has."""

    engine_id: str
    name: str
    num_open: int
    """Completions whose end was not told yet."""
    whole: Answer | None
    """Waits for the output; None when the prompt is streamed."""
    news: Answer | None = None
    """Waits for increments."""


class EngineThread(threading.Thread):
    """Runs an engine step by step, as long as there is work.

    Args:
        make_engine: makes the engine, in this thread.
        deliver: takes results.
        num_encoders: threads that convert values.
    """

    def __init__(
        self, make_engine: Callable[[], Engine], deliver: Deliver, num_encoders: int
    ) -> None:
        super().__init__(name="routebook-engine", daemon=True)
        self._make_engine = make_engine
        self._deliver = deliver
        self._pool = ThreadPoolExecutor(num_encoders, thread_name_prefix="routebook-encoder")
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._open: dict[int, _Open] = {}
        self._keys: dict[str, int] = {}
        self._when_idle: deque[Command] = deque()
        self._held_back: dict[int, Command] = {}
        self._batch: Batch = []

    def submit(self, command: Command) -> None:
        """Run a command between two steps."""
        self._commands.put(command)

    def stop(self) -> None:
        """Shut the engine down and end the thread, after the commands submitted before."""
        self._commands.put(None)

    def start_engine(self, started: Answer) -> None:
        """Start the thread; the answer is the engine, or the error with which it did not start."""
        self._start_answer = started
        self.start()

    def run(self) -> None:
        """Live until `stop`."""
        try:
            engine = self._make_engine()
        except RoutebookError as error:
            self._deliver([(self._start_answer, error)])
            return
        self._deliver([(self._start_answer, engine)])
        try:
            while self._take_commands(engine):
                self._advance(engine)
                self._flush()
        finally:
            self._end(engine)

    def add(self, engine: Engine, prompt: Prompt, whole: Answer | None, admitted: Answer) -> None:
        """Queue a prompt.

        Args:
            engine: the engine.
            prompt: what to generate.
            whole: waits for its output; without it the prompt is streamed, see `read`.
            admitted: waits for the prompt to be taken or refused.
        """
        if self._when_idle:
            self._held_back[prompt.key] = partial(
                self.add, prompt=prompt, whole=whole, admitted=admitted
            )
            return
        try:
            if prompt.name in self._keys:
                raise RequestError(f"request_id={prompt.name!r} is that of an open request already")
            engine_id = engine.add_request(
                prompt.token_ids,
                prompt.params,
                prompt.text,
                streamed=whole is None,
                cache_salt=prompt.cache_salt,
            )
        except RoutebookError as error:
            self._answer(admitted, error)
            return
        self._keys[prompt.name] = prompt.key
        self._open[prompt.key] = _Open(engine_id, prompt.name, prompt.params.n, whole)
        self._answer(admitted, None)

    def read(self, engine: Engine, key: int, news: Answer) -> None:
        """Wait for news of a streamed prompt: a list of increments."""
        opened = self._open[key]
        opened.news = news
        self._tell_news(engine, key, opened)

    def abort(self, engine: Engine, name: str) -> None:
        """End a prompt with what it has, which those who wait for it get."""
        key = self._keys.get(name)
        if key is None:
            return
        opened = self._open[key]
        output = engine.abort(opened.engine_id)
        if output is not None:
            self._close_whole(output, key)
        else:
            self._tell_news(engine, key, opened)

    def forget(self, engine: Engine, key: int) -> None:
        """Nobody waits for a prompt any more."""
        self._held_back.pop(key, None)
        if key in self._open:
            engine.forget([self._open[key].engine_id])
            self._drop(key)

    def call(self, engine: Engine, function: Callable[[Engine], Any], answer: Answer) -> None:
        """Call a function of the engine."""
        try:
            self._answer(answer, function(engine))
        except RoutebookError as error:
            self._answer(answer, error)

    def call_when_idle(
        self, engine: Engine, function: Callable[[Engine], Any], answer: Answer
    ) -> None:
        """Call a function once all open prompts have ended; prompts that come meanwhile wait behind it.

        The engine could wait by itself, but would neither hand out increments nor hear of aborts meanwhile.
        """
        self._when_idle.append(partial(self.call, function=function, answer=answer))

    def _take_commands(self, engine: Engine) -> bool:
        """Run what is queued; waits for a command while there is nothing else to do. False to stop."""
        waits = not engine.can_advance and not self._can_call_idle(engine)
        while waits or not self._commands.empty():
            waits = False
            command = self._commands.get()
            if command is None:
                return False
            command(engine)
        return True

    def _can_call_idle(self, engine: Engine) -> bool:
        return bool(self._when_idle) and (engine.is_paused or not engine.has_work)

    def _advance(self, engine: Engine) -> None:
        """One step, if there is one to take, and what became known by it."""
        if self._can_call_idle(engine):
            self._when_idle.popleft()(engine)
            self._admit_held_back(engine)
        outputs: list[RequestOutput] = []
        # A failure ends all that is open; the next step hands that out, and `add` refuses from then on.
        with suppress(WorkerError):
            outputs = engine.step() if engine.can_advance else []
        keys = {o.engine_id: key for key, o in self._open.items()} if outputs else {}
        for output in outputs:
            self._close_whole(output, keys[output.request_id])
        for key, opened in list(self._open.items()):
            self._tell_news(engine, key, opened)

    def _admit_held_back(self, engine: Engine) -> None:
        while self._held_back and not self._when_idle:
            self._held_back.pop(next(iter(self._held_back)))(engine)

    def _tell_news(self, engine: Engine, key: int, opened: _Open) -> None:
        if opened.news is None:
            return
        increments = engine.take_increments(opened.engine_id)
        if not increments:
            return
        self._answer(opened.news, increments)
        opened.news = None
        opened.num_open -= sum(increment.finish_reason is not None for increment in increments)
        if not opened.num_open:
            self._drop(key)

    def _close_whole(self, output: RequestOutput, key: int) -> None:
        whole = self._open[key].whole
        assert whole is not None, "a streamed prompt came out whole"
        self._answer(whole, output)
        self._drop(key)

    def _drop(self, key: int) -> None:
        del self._keys[self._open.pop(key).name]

    def _answer(self, answer: Answer, value: Any) -> None:
        self._batch.append((answer, value))

    def _flush(self) -> None:
        """Send off the answers of a step: increments together, since they are small, and each output by itself."""
        batch, self._batch = self._batch, []
        plain = [(a, v) for a, v in batch if a.convert is None or isinstance(v, RoutebookError)]
        if plain:
            self._deliver(plain)
        rest = [
            (a, v) for a, v in batch if not (a.convert is None or isinstance(v, RoutebookError))
        ]
        increments = [(a, v) for a, v in rest if not isinstance(v, RequestOutput)]
        for part in [increments, *([one] for one in rest if isinstance(one[1], RequestOutput))]:
            if part:
                future = self._pool.submit(_convert, part)
                future.add_done_callback(partial(self._deliver_converted, part))

    def _deliver_converted(self, batch: Batch, future: Future[Batch]) -> None:
        error = future.exception()
        self._deliver(future.result() if error is None else [(a, error) for a, _ in batch])

    def _end(self, engine: Engine) -> None:
        """Answer all that still wait, with what the engine's end leaves them."""
        try:
            engine.shutdown()
            self._advance(engine)
            while self._when_idle:
                self._advance(engine)
        finally:
            # Also if a fault of our own ended the thread, and meets it here again.
            for opened in self._open.values():
                for answer in filter(None, (opened.whole, opened.news)):
                    self._answer(answer, WorkerError("the engine has ended"))
            self._flush()
            self._pool.shutdown()


def _convert(batch: Batch) -> Batch:
    return [(answer, _converted(answer, value)) for answer, value in batch]


def _converted(answer: Answer, value: Any) -> Any:
    assert answer.convert is not None
    try:
        return answer.convert(value)
    except RoutebookError as error:
        return error
