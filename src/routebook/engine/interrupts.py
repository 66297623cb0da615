"""Interrupts that wait while something is changed which must not stay half changed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Let signals that Python code handles, Ctrl-C for one, wait until the block has ended.

    Python runs such code in its main thread only, so elsewhere this does nothing.
    """
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {int(n): h for n in _SIGNALS if callable(h := signal.getsignal(n))}
    came: list[tuple[int, FrameType | None]] = []
    for number in handlers:
        signal.signal(number, lambda *call: came.append(call))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in came:
            handlers[number](number, frame)
