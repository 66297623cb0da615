"""What `drift` prints for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from routebook.cli.report import plural

if TYPE_CHECKING:
    from routebook.replay.drift_report import DriftReport
    from routebook.replay.gap import Gap


def table_lines(report: DriftReport) -> Iterator[str]:
    """The report, the verdict last."""
    yield (
        f"{plural(report.num_samples, 'sample')}, {plural(report.num_rows, 'row')};"
        f" {report.fallback_share:.1%} of tokens without a usable row"
    )
    yield (
        f"other experts in {report.different_pairs:.2%} of (token, layer) pairs and"
        f" {report.different_tokens:.2%} of tokens"
    )
    yield ""
    yield "layer  other experts  own choice when replayed"
    for layer in report.layers:
        yield f"{layer.layer_id:5}  {layer.different:13.2%}  {layer.own_overlap:24.2%}"
    yield ""
    yield "sampled tokens               number         KL  mean gap  max gap (log-probability)"
    yield _gap_line("all", "native", report.native)
    yield _gap_line("", "replayed", report.replayed)
    yield _gap_line("experts differ", "native", report.rerouted_native)
    yield _gap_line("", "replayed", report.rerouted_replayed)
    yield ""
    for fault in report.faults:
        yield f"fault: {fault.text}"
    yield report.verdict


def _gap_line(tokens: str, forward: str, gap: Gap) -> str:
    return (
        f"{tokens:15} {forward:9}  {gap.num_tokens:8}  {gap.kl:9.3e}  {gap.mean_logprob_gap:8.4f}"
        f"  {gap.max_logprob_gap:7.4f}"
    )
