"""All runs of a comparison, and the file that holds them."""

from __future__ import annotations

import platform
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from examples.grpo_arithmetic.drift import Drift, present_drift
from examples.grpo_arithmetic.settings import Settings
from examples.grpo_arithmetic.training import Run, train
from examples.grpo_arithmetic.warm_up import warm_up
from routebook import LLM

_PACKAGES = ("torch", "transformers", "trl", "accelerate", "numpy")


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What was run, where, and what came of it."""

    date: str
    machine: str
    versions: dict[str, str]
    settings: Settings
    drift_before: Drift
    """Of the model that all runs begin with."""
    runs: list[Run]

    def of(self, *, replays: bool) -> list[Run]:
        """The runs with R3, or those without, by seed."""
        return [run for run in self.runs if run.replays == replays]


def compare(settings: Settings) -> Comparison:
    """Warm the bundled model up, then train it once with and once without R3 per seed."""
    cases = [(seed, replays) for seed in settings.seeds for replays in (False, True)]
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder)
        warm_up(settings, start)
        drift_before = _drift_before(settings, start)
        runs = [
            train(settings, start, seed, replays=replays)
            for seed, replays in tqdm(cases, desc="runs", unit="run")
        ]
    return Comparison(
        date=date.today().isoformat(),
        machine=_machine(settings.device),
        versions={
            "python": platform.python_version(),
            **{name: version(name) for name in _PACKAGES},
        },
        settings=settings,
        drift_before=drift_before,
        runs=runs,
    )


def _drift_before(settings: Settings, start: Path) -> Drift:
    llm = LLM(str(start), dtype="bfloat16", device=settings.device)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    return present_drift(model.to(settings.device), llm, start, settings.seeds[0])


def _machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, {torch.get_num_threads()} thread(s)"
    return platform.machine()
