"""Entry point of the command `routebook`.

Exit status: 0 all well, 1 `verify` found different or absent rows, 2 the input cannot be used (one line on standard
error), 130 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from io import TextIOWrapper
from typing import Any, NoReturn

from routebook.cli import demo, generate, inspect, verify
from routebook.errors import RequestError, RoutebookError

_COMMANDS = (demo, generate, inspect, verify)
_EPILOG = (
    "exit status: 0 all well, 1 verify found different or absent rows, 2 the input cannot be used"
)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as all other errors do, and takes whole flags only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    if isinstance(sys.stdout, TextIOWrapper):
        # A completion may hold characters that the terminal's encoding does not know.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        parsed = build_parser().parse_args(arguments)
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except RoutebookError as error:
        print(f"routebook: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("routebook: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python flushes standard output once more on its way out; that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


def build_parser() -> argparse.ArgumentParser:
    """All commands with their flags."""
    parser = _Parser(
        prog="routebook", description="Which experts did this token really use?", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"routebook {version('routebook')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
