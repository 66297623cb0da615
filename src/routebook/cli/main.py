"""Entry point of the command `routebook`.

Exit status: 0 all well, 1 `verify` found different or absent rows or `drift` did not pass, 2 the input cannot be used
(one line on standard error), 130 interrupted, 141 the reader of the output went away, 129 and 143 ended by SIGHUP and
SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType
from typing import NoReturn

from routebook.errors import RoutebookError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    if isinstance(sys.stdout, TextIOWrapper):
        # A completion may hold characters that the terminal's encoding does not know.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _unwinding_when_told_to_end():
            return _run(arguments)
    except RoutebookError as error:
        print(f"routebook: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except _ToldToEnd as told:
        print(f"routebook: ended by {told.signal.name}", file=sys.stderr)
        return 128 + told.signal
    except KeyboardInterrupt:
        print("routebook: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Python flushes standard output once more on its way out; that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(arguments: Sequence[str] | None) -> int:
    # Only now: an interrupt while the commands are loaded is one like any other.
    from routebook.cli.parser import build_parser

    parsed = build_parser().parse_args(arguments)
    status: int = parsed.run(parsed)
    sys.stdout.flush()
    return status


class _ToldToEnd(KeyboardInterrupt):
    """Another process asks this one to end, which is met like an interrupt from the keyboard."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


@contextmanager
def _unwinding_when_told_to_end() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind what runs inside, so that no half-written file stays.

    Where somebody else has decided what a signal means, `nohup` for instance, it stays so.
    """
    numbers = []
    if threading.current_thread() is threading.main_thread():
        numbers = [
            n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL
        ]
    for number in numbers:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _raise(number: int, _: FrameType | None) -> NoReturn:
    raise _ToldToEnd(number)


if __name__ == "__main__":
    sys.exit(main())
