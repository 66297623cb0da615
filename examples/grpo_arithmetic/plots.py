"""The comparison as two pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from examples.grpo_arithmetic.comparison import Comparison
from examples.grpo_arithmetic.tables import curve
from examples.grpo_arithmetic.training import Run

_COLOURS = {False: "tab:orange", True: "tab:blue"}
_NAMES = {False: "without R3", True: "with R3"}


def draw(comparison: Comparison, stem: Path) -> list[Path]:
    """Write `STEM-reward.svg` and `STEM-mismatch.svg`; returns their paths."""
    plt.rcParams["svg.hashsalt"] = "miniature"  # the same numbers make the same file
    return [
        _picture(comparison, stem, "reward", _draw_reward),
        _picture(comparison, stem, "mismatch", _draw_mismatch),
    ]


def _picture(comparison: Comparison, stem: Path, name: str, draw_on: Any) -> Path:
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    draw_on(axes, comparison)
    axes.set_xlabel("step")
    axes.legend()
    path = stem.with_name(f"{stem.name}-{name}.svg")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _draw_reward(axes: Any, comparison: Comparison) -> None:
    axes.set_ylabel("share of right sums")
    for replays, name in _NAMES.items():
        runs = comparison.of(replays=replays)
        _draw(axes, curve(runs, lambda step: step.reward), name, _COLOURS[replays])


def _draw_mismatch(axes: Any, comparison: Comparison) -> None:
    axes.set_ylabel("KL, trainer against engine (nats)")
    axes.set_yscale("log")
    for replays, name in _NAMES.items():
        runs = comparison.of(replays=replays)
        _draw(axes, curve(runs, lambda step: step.gap.kl), name, _COLOURS[replays])
    native = _native(comparison.of(replays=True))
    _draw(axes, native, "live routers, same tokens and weights as with R3", "tab:gray")


def _native(runs: list[Run]) -> list[list[float]]:
    return [[step.native_gap.kl for step in run.steps if step.native_gap] for run in runs]


def _draw(axes: Any, values: list[list[float]], name: str, colour: str) -> None:
    """Each run thin, their mean thick."""
    steps = np.arange(1, len(values[0]) + 1)
    for run in values:
        axes.plot(steps, run, color=colour, linewidth=0.6, alpha=0.4)
    axes.plot(steps, np.mean(values, axis=0), color=colour, linewidth=2, label=name)
