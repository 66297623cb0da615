"""`routebook demo`: the whole promise on the bundled model, in one go."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from routebook.cli.generate import generate
from routebook.cli.inspect import inspect, write_picture
from routebook.cli.report import report_lines
from routebook.cli.verify import verify
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import RequestError

_MODEL = "tiny"
_CONFIG = {"dtype": "float32"}
_PREFIX = "17+25=42\n"
_TAILS = ("",)


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "demo", help="generate with the bundled model, picture the experts, verify every row"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo.routes"),
        metavar="FILE.routes",
        help="where the record goes; the picture goes beside it (default: demo.routes)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate, picture, verify; the status is that of `verify`."""
    out: Path = arguments.out
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"cannot make the folder of --out {out}: {error}") from error
    params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=64, seed=0)
    generate(_MODEL, [_PREFIX + tail for tail in _TAILS], params, out, _CONFIG)
    report = inspect(out)
    picture = out.with_suffix(".html")
    write_picture(report, picture)
    print("", *report_lines(report), "", f"picture of expert load: {picture}", sep="\n", flush=True)
    status = verify(out, _MODEL, {})
    sys.stdout.flush()
    return status
