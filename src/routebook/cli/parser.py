"""The commands of `routebook` with their flags."""

from __future__ import annotations

import argparse
from importlib.metadata import version
from typing import Any, NoReturn

from routebook.cli import demo, drift, generate, inspect, serve, verify
from routebook.errors import RequestError

_COMMANDS = (demo, drift, generate, inspect, serve, verify)
_EPILOG = (
    "exit status: 0 all well, 1 verify found different or absent rows or drift did not pass,"
    " 2 the input cannot be used"
)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as all other errors do, and takes whole flags only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message}; see {self.prog} --help")


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
