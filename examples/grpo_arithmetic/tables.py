"""The comparison as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import mean

from examples.grpo_arithmetic.comparison import Comparison
from examples.grpo_arithmetic.drift import Drift
from examples.grpo_arithmetic.training import Gap, Run, Step

_SOME = 10
"""Steps at either end of a run over which its reward is averaged."""


def markdown(comparison: Comparison) -> str:
    """What was run, and three tables: the runs, native beside replayed by step, and the drift at the end."""
    settings = comparison.settings
    head = [
        f"{comparison.date}, {comparison.machine}; "
        + ", ".join(f"{name} {number}" for name, number in comparison.versions.items())
        + ".",
        f"{settings.steps} steps of {settings.prompts_per_step} prompts with {settings.completions_per_prompt} "
        f"completions each, learning rate {settings.learning_rate:g}, {settings.num_iterations} update(s) per "
        f"rollout, seeds {', '.join(map(str, settings.seeds))}; {settings.warm_up_steps} supervised steps before.",
    ]
    tables = (_runs(comparison), _pairs(comparison), _drifts(comparison))
    return "\n\n".join([*head, *map("\n".join, tables)]) + "\n"


def _runs(comparison: Comparison) -> Iterator[str]:
    yield (
        "| seed | R3 | reward, first steps | last steps | entropy, last steps | mismatch KL, mean | greatest "
        "| tokens beyond 2x | greatest ratio | CPU s |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for run in comparison.runs:
        first, last = run.steps[:_SOME], run.steps[-_SOME:]
        yield (
            f"| {run.seed} | {'yes' if run.replays else 'no'} | {mean(s.reward for s in first):.3f} "
            f"| {mean(s.reward for s in last):.3f} | {mean(s.entropy for s in last):.3f} "
            f"| {_gap_cells([step.gap for step in run.steps])} | {run.cpu_seconds:.0f} |"
        )


def _pairs(comparison: Comparison) -> Iterator[str]:
    """By step, native and replayed on the same tokens and weights: no difference of trajectories comes in."""
    yield (
        "| seed, trained with R3 | passes | mismatch KL, mean | greatest | tokens beyond 2x | greatest ratio |"
    )
    yield "|---|---|---|---|---|---|"
    for run in comparison.of(replays=True):
        native = [step.native_gap for step in run.steps if step.native_gap is not None]
        yield f"| {run.seed} | live routers | {_gap_cells(native)} |"
        yield f"| | replayed | {_gap_cells([step.gap for step in run.steps])} |"


def _gap_cells(gaps: Sequence[Gap]) -> str:
    ratio = math.exp(max(gap.max for gap in gaps))
    return (
        f"{mean(gap.kl for gap in gaps):.2e} | {max(gap.kl for gap in gaps):.2e} "
        f"| {mean(gap.extreme for gap in gaps):.3%} | {ratio:.2f}"
    )


def _drifts(comparison: Comparison) -> Iterator[str]:
    yield "| weights | tokens | experts differ (pairs) | (tokens) | KL native | KL replayed | factor |"
    yield "|---|---|---|---|---|---|---|"
    yield _drift_row("before GRPO", comparison.drift_before)
    for run in comparison.runs:
        name = "with R3" if run.replays else "without R3"
        yield _drift_row(f"seed {run.seed}, trained {name}", run.drift)


def _drift_row(name: str, drift: Drift) -> str:
    return (
        f"| {name} | {drift.num_tokens} | {drift.different_pairs:.2%} | {drift.different_tokens:.2%} "
        f"| {drift.kl_native:.2e} | {drift.kl_replayed:.2e} | {drift.kl_native / drift.kl_replayed:.2f} |"
    )


def curve(runs: Sequence[Run], value: Callable[[Step], float]) -> list[list[float]]:
    """A value by run and step."""
    return [[value(step) for step in run.steps] for run in runs]
