"""`routebook verify FILE.routes --model MODEL`: a fresh forward pass over every sample, row by row."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from routebook.cli.extras import engine_module
from routebook.cli.options import add_options, take_options
from routebook.cli.quiet import quiet_loading
from routebook.cli.record import add_record_and_model, read_samples
from routebook.engine.config import DTYPES, ModelConfig
from routebook.errors import RequestError
from routebook.routes import Comparison, RouteSample

Pairs = Iterator[tuple[RouteSample, Comparison]]

_NOT_FOR_VERIFY = frozenset({"reference"})
_COARSE = ("bfloat16", "float16")
_DESCRIPTION = """Run a fresh transformers forward pass over prompt and completion of every sample and compare its
experts with the recorded ones. The status is 0 when every row is there and equal, else 1."""


@dataclass(slots=True)
class _Totals:
    """Counts over all samples, and the first row of each trouble in words."""

    rows: int = 0
    layers: int = 0
    equal: int = 0
    different: int = 0
    absent: int = 0
    first_difference: str | None = None
    first_absent: str | None = None
    coarse_dtype: str | None = None
    """The number format of a record that differs, if its rounding can explain a difference."""

    def add(self, sample: RouteSample, comparison: Comparison) -> None:
        self.rows += comparison.num_rows
        self.layers = comparison.num_layers
        self.equal += comparison.equal_rows
        self.different += comparison.different_rows
        self.absent += comparison.absent_rows
        if comparison.different_rows and self.first_difference is None:
            self.first_difference = _describe_difference(sample, comparison)
            dtype = sample.meta.get("dtype")
            self.coarse_dtype = dtype if dtype in _COARSE else None
        if comparison.absent_rows and self.first_absent is None:
            self.first_absent = _describe_absent(sample)

    def lines(self) -> Iterator[str]:
        """What was found; the totals come last."""
        if self.first_difference is not None:
            yield f"first difference: {self.first_difference}"
        if self.first_absent is not None:
            yield f"first absent row: {self.first_absent}"
        if self.coarse_dtype is not None:
            yield (
                f"note: in {self.coarse_dtype}, sums rounded in another order can change a choice;"
                " generate with --dtype float32 to tell rounding from a wrong row"
            )
        absent = f", {self.absent} absent" if self.absent else ""
        yield (
            f"verified: {self.rows} rows x {self.layers} layers,"
            f" {self.equal} equal, {self.different} different{absent}"
        )


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "verify",
        help="check a record against a fresh forward pass of transformers",
        usage="%(prog)s FILE.routes --model MODEL [options]",
        description=_DESCRIPTION,
    )
    add_record_and_model(parser, "the record to check")
    parser.add_argument(
        "--ignore-order",
        action="store_true",
        help="compare the picks of a row as a set (for engines whose top-k is unsorted)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="number format of the forward pass; unset takes the one that made the record,"
        " auto the checkpoint's",
    )
    add_options(parser, ModelConfig, skip=_NOT_FOR_VERIFY | {"dtype"})
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify one file; 0 when all rows are equal, else 1."""
    config = take_options(arguments, ModelConfig)
    return verify(arguments.file, arguments.model, config, ignore_order=arguments.ignore_order)


def verify(path: Path, model: str, config: dict[str, Any], *, ignore_order: bool = False) -> int:
    """Print the first row of each trouble, if any, and a line of totals. Absent rows are a failure, too.

    The forward pass runs in the number format that made the record, unless `config` names another.

    Raises:
        RoutebookError: the file cannot be used, or another model made it.
    """
    samples = read_samples(path)
    if not any(sample.record.num_rows for sample in samples):
        raise RequestError(f"{path} holds no row, so there is nothing to verify")
    config = {"dtype": _recorded_dtype(path, samples)} | config if "dtype" not in config else config
    verification = engine_module("verification")
    quiet_loading(model)
    verifier = verification.Verifier(model, ModelConfig(**config))
    totals = _Totals()
    for sample, comparison in _progress(
        verifier.verify(samples, order=not ignore_order), len(samples)
    ):
        totals.add(sample, comparison)
    print(*totals.lines(), sep="\n")
    return 1 if totals.different or totals.absent else 0


def _recorded_dtype(path: Path, samples: list[RouteSample]) -> str:
    """The number format that made the record, `auto` where it does not say."""
    dtypes = {sample.meta.get("dtype", "auto") for sample in samples}
    if len(dtypes) > 1:
        raise RequestError(
            f"the samples of {path} were made in {', '.join(sorted(dtypes))}; name one with --dtype"
        )
    return dtypes.pop()


def _describe_difference(sample: RouteSample, comparison: Comparison) -> str:
    first = comparison.first_difference
    assert first is not None
    return (
        f"{_describe_position(sample, first.position)}, layer {first.layer_id}:"
        f" recorded {list(first.a_ids)}, computed {list(first.b_ids)}"
    )


def _describe_absent(sample: RouteSample) -> str:
    record = sample.record
    return _describe_position(sample, record.start + int(record.valid_T.argmin()))


def _describe_position(sample: RouteSample, position: int) -> str:
    kind = "prompt" if position < sample.num_prompt_tokens else "completion"
    return f"request {sample.meta.get('request_id', '?')}, position {position} ({kind})"


def _progress(pairs: Pairs, total: int) -> Pairs:
    """The same pairs with a bar, which appears once the first sample is known to be the model's."""
    from tqdm import tqdm

    first = next(pairs)
    bar: Pairs = iter(
        tqdm(chain([first], pairs), total=total, desc="verify", unit="sample", file=sys.stderr)
    )
    return bar
