"""`routebook inspect FILE.routes`: what a record holds, and how evenly the experts are loaded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from routebook.cli.picture import render_load
from routebook.cli.report import FileReport, make_report, report_lines
from routebook.errors import RequestError
from routebook.routes import expert_load, read_routes


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "inspect", help="schema, rows, provenance and expert load of a record"
    )
    parser.add_argument("file", type=Path, metavar="FILE.routes")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a picture of expert load")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; write the picture if asked."""
    report = inspect(arguments.file)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        print("\n".join(report_lines(report)))
    if arguments.html is not None:
        write_picture(report, arguments.html)
    return 0


def inspect(path: Path) -> FileReport:
    """Read a file and collect its figures.

    Raises:
        FormatError: the file is damaged, truncated or empty.
        SchemaMismatchError: its samples are of different models.
        RecordError: none of its rows is valid.
    """
    samples = list(read_routes(path))
    return make_report(str(path), samples, expert_load(sample.record for sample in samples))


def write_picture(report: FileReport, path: Path) -> None:
    """Write the picture of expert load.

    Raises:
        RequestError: the path cannot be written.
    """
    try:
        path.write_text(render_load(report), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot write the picture {path}: {error}") from error
