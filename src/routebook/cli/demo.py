"""`routebook demo`: the whole promise on the bundled model, in one go."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routebook.cli.generate import Prompts, generate
from routebook.cli.inspect import inspect, write_picture
from routebook.cli.record import writing
from routebook.cli.report import report_lines
from routebook.cli.verify import verify
from routebook.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from routebook.engine.outputs import RequestOutput

MODEL = "tiny"
CONFIG = {"dtype": "float32"}
PARAMS = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=48, seed=0)

PREFIX = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune,"
    " must be in want of a wife.\n\n"
)
"""36 tokens of the bundled model: two full KV blocks, which one prompt computes and the others share."""

TAILS = (
    "",
    "She",
    "Mr. Bennet",
    "Elizabeth could not",
    "Captain Wentworth",
    '"My dear," said his lady to him one day, "',
    "When the ladies returned to the drawing-room, there was",
    "The rain continued the whole evening without stopping; but the next morning",
    "Mr. Darcy, who had been standing near the window, came towards her, and",
    '"And pray, sir," cried Mrs. Norris, who had heard nothing of the letter, "what',
    "In the middle of the dance, while every body was looking at Emma and her partner, the door was opened, and",
)
SUMS = "12+34=46\n50+27=77\n8+5=13\n17+25="
"""The other thing that the bundled model can do. It shares nothing with the prose."""

_WIDTH = 100
_DESCRIPTION = """Complete a dozen prompts with the bundled model in float32, report and picture the load of its
experts, and check every recorded row against a fresh forward pass of transformers. The status is that of `verify`."""


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "demo",
        help="generate with the bundled model, picture the experts, verify every row",
        description=_DESCRIPTION,
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo.routes"),
        metavar="FILE.routes",
        help="where the record goes; the picture goes beside it (default: demo.routes)",
    )
    parser.set_defaults(run=run)


def prompts() -> Prompts:
    """The demo's prompts: prose behind one prefix, and sums."""
    return [*(PREFIX + tail for tail in TAILS), SUMS]


def run(arguments: argparse.Namespace) -> int:
    """Generate, picture, verify; the status is that of `verify`."""
    out: Path = arguments.out
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    generate(MODEL, prompts(), PARAMS, out, CONFIG, show=_show)
    report = inspect(out)
    picture = out.with_suffix(".html")
    write_picture(report, picture)
    print("", *report_lines(report), "", f"picture of expert load: {picture}", sep="\n", flush=True)
    status = verify(out, MODEL, {})
    sys.stdout.flush()
    return status


def _show(output: RequestOutput, _tokenizer: Any) -> None:
    """Print a completion behind its own part of the prompt; the shared prefix is printed once."""
    prompt = output.prompt or ""
    tail = prompt.removeprefix(PREFIX)
    if output.request_id == "0":
        print(f'All but the last of these prompts begin with: "{PREFIX.strip()}"\n')
    text = f"{tail} >>> {output.choices[0].text.strip()}".strip()
    head = f"[{output.request_id}] "
    print(head + _wrapped(text, " " * len(head)))


def _wrapped(text: str, indent: str) -> str:
    """The text's own lines, each wrapped, all but the very first indented."""
    lines = [
        wrapped
        for line in text.split("\n")
        for wrapped in textwrap.wrap(line, _WIDTH - len(indent)) or [""]
    ]
    return "\n".join([lines[0], *((indent + line).rstrip() for line in lines[1:])])
