"""`routebook verify FILE.routes --model MODEL`: a fresh forward pass over every sample, row by row."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routebook.cli.extras import engine_module
from routebook.cli.options import add_options, take_options
from routebook.engine.config import ModelConfig
from routebook.routes import Comparison, RouteSample, read_routes

_NOT_FOR_VERIFY = frozenset({"reference"})


@dataclass(slots=True)
class _Totals:
    """Counts over all samples."""

    rows: int = 0
    layers: int = 0
    equal: int = 0
    different: int = 0
    absent: int = 0

    def add(self, comparison: Comparison) -> None:
        self.rows += comparison.num_rows
        self.layers = comparison.num_layers
        self.equal += comparison.equal_rows
        self.different += comparison.different_rows
        self.absent += comparison.absent_rows


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "verify", help="check a record against a fresh forward pass of transformers"
    )
    parser.add_argument("file", type=Path, metavar="FILE.routes")
    parser.add_argument(
        "--model", required=True, help="the model that made it: folder, hub id, `tiny`"
    )
    parser.add_argument(
        "--ignore-order",
        action="store_true",
        help="compare the picks of a row as a set (for engines whose top-k is unsorted)",
    )
    add_options(parser, ModelConfig, skip=_NOT_FOR_VERIFY)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify one file; 0 when all rows are equal, else 1."""
    config = take_options(arguments, ModelConfig)
    return verify(arguments.file, arguments.model, config, ignore_order=arguments.ignore_order)


def verify(path: Path, model: str, config: dict[str, Any], *, ignore_order: bool = False) -> int:
    """Print the first difference, if any, and a line of totals. Absent rows count as different.

    The forward pass runs in the number format that made the record, unless `config` names another.

    Raises:
        RoutebookError: the file is damaged, or another model made it.
    """
    samples = list(read_routes(path))
    config = {"dtype": samples[0].meta.get("dtype", "auto")} | config
    verifier = engine_module("verification").Verifier(model, ModelConfig(**config))
    totals = _Totals()
    for sample, comparison in _progress(
        verifier.verify(samples, order=not ignore_order), len(samples)
    ):
        if comparison.different_rows and not totals.different:
            print(f"first difference: {_describe(sample, comparison)}")
        totals.add(comparison)
    absent = f", {totals.absent} absent" if totals.absent else ""
    print(
        f"verified: {totals.rows} rows x {totals.layers} layers,"
        f" {totals.equal} equal, {totals.different} different{absent}"
    )
    return 1 if totals.different or totals.absent else 0


def _describe(sample: RouteSample, comparison: Comparison) -> str:
    first = comparison.first_difference
    assert first is not None
    kind = "prompt" if first.position < sample.num_prompt_tokens else "completion"
    return (
        f"request {sample.meta.get('request_id', '?')}, position {first.position} ({kind}),"
        f" layer {first.layer_id}: recorded {list(first.a_ids)}, computed {list(first.b_ids)}"
    )


def _progress(pairs: Iterable[Any], total: int) -> Iterable[Any]:
    from tqdm import tqdm

    bar: Iterable[Any] = tqdm(pairs, total=total, desc="verify", unit="sample", file=sys.stderr)
    return bar
