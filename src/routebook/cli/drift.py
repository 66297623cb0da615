"""`routebook drift FILE.routes --model MODEL`: does replaying this record bring the trainer closer to the rollout?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from routebook.cli.drift_picture import render_drift
from routebook.cli.drift_table import table_lines
from routebook.cli.extras import engine_module
from routebook.cli.options import add_options, take_options
from routebook.cli.quiet import quiet_loading
from routebook.cli.record import add_record_and_model, read_samples, writing
from routebook.engine.config import DTYPES, ModelConfig
from routebook.errors import RequestError
from routebook.routes import RouteSample

if TYPE_CHECKING:
    from routebook.replay.drift_report import DriftReport

_NOT_FOR_DRIFT = frozenset({"reference", "dtype"})
_DESCRIPTION = """Run a trainer's forward over the tokens of every sample twice, natively and along the recorded
experts, and compare both with the rollout: the same model in the number format that made the record. Rows in a wrong
place are found and named. The status is 0 when all rows lie where they belong and replay brings the KL divergence down
5 times on the tokens whose experts differ, else 1."""


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "drift",
        help="native against replayed forward of a trainer, and misplaced rows",
        usage="%(prog)s FILE.routes --model MODEL [options]",
        description=_DESCRIPTION,
    )
    add_record_and_model(parser, "the record to replay")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="number format of the trainer's forward (default: float32)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE.html", help="write a plot")
    add_options(parser, ModelConfig, skip=_NOT_FOR_DRIFT)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Report on one file; 0 when it passes, else 1."""
    if arguments.html is not None and arguments.html.suffix != ".html":
        raise RequestError(f"--html {arguments.html} does not end in .html; name the plot so")
    device = take_options(arguments, ModelConfig).get("device", ModelConfig().device)
    samples = _samples(arguments.file)
    rollout_dtype = recorded_dtype(arguments.file, samples)
    report = drift(samples, arguments.model, rollout_dtype, arguments.dtype, device)
    title = f"{arguments.file}: rollout in {rollout_dtype}, trainer in {arguments.dtype}"
    if arguments.html is not None:
        with writing(arguments.html):
            arguments.html.write_text(render_drift(title, report), encoding="utf-8")
    if arguments.json:
        print(_json(arguments, rollout_dtype, report))
    else:
        print(title, *table_lines(report), sep="\n")
    return 0 if report.passes else 1


def drift(
    samples: Sequence[RouteSample], model: str, rollout_dtype: str, dtype: str, device: str
) -> DriftReport:
    """Load the model in both number formats and compare.

    Raises:
        RoutebookError: the model cannot be used, or another one made the samples.
    """
    loader = engine_module("model_loader")
    from routebook.replay.drift import measure_drift

    quiet_loading(model)
    trainer = loader.load_plain(model, ModelConfig(dtype=dtype, device=device))
    fingerprint = loader.model_fingerprint(trainer)
    for sample in samples:
        loader.check_maker(sample, model, fingerprint)
    rollout = trainer
    if dtype != rollout_dtype:
        rollout = loader.load_plain(model, ModelConfig(dtype=rollout_dtype, device=device))
    return measure_drift(trainer, _progress(samples), rollout=rollout)


def recorded_dtype(path: Path, samples: Sequence[RouteSample]) -> str:
    """The number format that made the record.

    Raises:
        RequestError: the samples do not say it, or disagree.
    """
    dtypes = {sample.meta.get("dtype") for sample in samples}
    (dtype, *more) = dtypes
    if more or dtype not in DTYPES:
        raise RequestError(
            f"the samples of {path} say that they were made in {', '.join(map(str, dtypes))}; drift needs one "
            f"number format of {', '.join(DTYPES)}, in each sample's meta['dtype']"
        )
    return dtype


def _samples(path: Path) -> list[RouteSample]:
    samples = [s for s in read_samples(path) if s.record.valid_T.any() and len(s.sampled_token_ids)]
    if not samples:
        raise RequestError(f"{path} holds no sample with rows and sampled tokens to compare")
    return samples


def _json(arguments: argparse.Namespace, rollout_dtype: str, report: DriftReport) -> str:
    whole = {
        "file": str(arguments.file),
        "model": arguments.model,
        "rollout_dtype": rollout_dtype,
        "trainer_dtype": arguments.dtype,
        "passes": report.passes,
        "verdict": report.verdict,
        **msgspec.to_builtins(report),
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=2).decode()


def _progress(samples: Sequence[RouteSample]) -> Any:
    from tqdm import tqdm

    return tqdm(samples, desc="drift", unit="sample", file=sys.stderr)
