"""Entry point of the command `routebook`.

Exit status: 0 all well, 1 `verify` found different rows, 2 the input cannot be used (one line on standard error).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from routebook.cli import demo, generate, inspect, verify
from routebook.errors import RoutebookError

_COMMANDS = (demo, generate, inspect, verify)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parsed = build_parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
    except RoutebookError as error:
        print(f"routebook: error: {error}", file=sys.stderr)
        return 2
    return status


def build_parser() -> argparse.ArgumentParser:
    """All commands with their flags."""
    parser = argparse.ArgumentParser(
        prog="routebook", description="Which experts did this token really use?"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
