"""GRPO on the bundled model with and without Rollout Routing Replay.

python -m examples.grpo_arithmetic --short
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
import transformers

from examples.grpo_arithmetic.comparison import compare
from examples.grpo_arithmetic.plots import draw
from examples.grpo_arithmetic.settings import LONG, SHORT
from examples.grpo_arithmetic.tables import markdown


def main(arguments: list[str] | None = None) -> None:
    """Run the comparison; write STEM.json, STEM.svg files, and print the tables."""
    options = _parser().parse_args(arguments)
    given = {"steps": options.steps, "learning_rate": options.learning_rate, "seeds": options.seeds}
    settings = replace(
        SHORT if options.short else LONG,
        device=options.device,
        **{name: value for name, value in given.items() if value is not None},
    )
    if settings.device == "cpu":
        # Several threads are slower for so small a model.
        torch.set_num_threads(1)
    _quiet()
    with redirect_stdout(sys.stderr):  # the trainer prints every step
        comparison = compare(settings)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_bytes(
        msgspec.json.format(msgspec.json.encode(comparison), indent=1) + b"\n"
    )
    draw(comparison, options.out)
    print(markdown(comparison), end="")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.grpo_arithmetic", description=__doc__)
    parser.add_argument("--short", action="store_true", help="few steps and seeds, for a CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument(
        "--seeds", type=lambda text: tuple(map(int, text.split(","))), help="0,1,2 for instance"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/miniature"), metavar="STEM", help="files to write"
    )
    return parser


def _quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("trl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="trl")


if __name__ == "__main__":
    main()
