"""`routebook inspect FILE.routes`: what a record holds, and how evenly the experts are loaded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from routebook.cli.picture import render_load
from routebook.cli.record import read_samples, writing
from routebook.cli.report import FileReport, make_report, report_lines
from routebook.errors import RequestError
from routebook.routes import expert_load

_DESCRIPTION = """Say what a .routes file holds: layers and experts, rows and where they came from, and how evenly
each layer loads its experts. Needs neither the model nor torch."""


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "inspect",
        help="schema, rows, provenance and expert load of a record",
        description=_DESCRIPTION,
    )
    parser.add_argument("file", type=Path, metavar="FILE.routes", help="the record to look at")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="FILE.html", help="write a picture of expert load"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; write the picture if asked."""
    if arguments.html is not None and arguments.html.suffix != ".html":
        raise RequestError(f"--html {arguments.html} does not end in .html; name the picture so")
    report = inspect(arguments.file)
    if arguments.html is not None:
        write_picture(report, arguments.html)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        print("\n".join(report_lines(report)))
    return 0


def inspect(path: Path) -> FileReport:
    """Read a file and collect its figures.

    Raises:
        RequestError: the file cannot be opened, or none of its rows is valid.
        FormatError: the file is damaged, truncated or empty.
        SchemaMismatchError: its samples are of different models.
    """
    samples = read_samples(path)
    if not any(sample.record.valid_T.any() for sample in samples):
        raise RequestError(f"{path} holds no valid row, so there is nothing to report")
    return make_report(str(path), samples, expert_load(sample.record for sample in samples))


def write_picture(report: FileReport, path: Path) -> None:
    """Write the picture of expert load.

    Raises:
        RequestError: the path cannot be written.
    """
    with writing(path):
        path.write_text(render_load(report), encoding="utf-8")
