"""What `inspect` says about a `.routes` file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from routebook.routes import ExpertLoad, RouteSample, RouteSchema


class LayerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Balance of one MoE layer."""

    layer_id: int
    entropy_bits: float
    relative_entropy: float
    """1 is perfectly balanced."""
    busiest_expert: int
    busiest_over_mean: float
    unused_experts: int
    counts: list[int]
    """Picks of each expert."""


class SampleReport(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of the file."""

    meta: dict[str, str]
    num_prompt_tokens: int
    num_tokens: int
    start: int
    num_rows: int
    num_absent_rows: int
    provenance: list[tuple[int, int, int, str]]
    """`(start, stop, weight version, origin)`."""


class FileReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole file."""

    file: str
    layer_ids: list[int]
    num_hidden_layers: int
    num_experts: int
    top_k: int
    dtype: str
    num_samples: int
    num_rows: int
    num_absent_rows: int
    rows_by_origin: dict[str, int]
    weight_versions: list[int]
    layers: list[LayerReport]
    samples: list[SampleReport]


def make_report(file: str, samples: Sequence[RouteSample], load: ExpertLoad) -> FileReport:
    """Collect the figures; `samples` are of one schema and not empty."""
    schema = load.schema
    spans = [span for sample in samples for span in sample.record.provenance]
    by_origin: Counter[str] = Counter()
    for span in spans:
        by_origin[span.origin.name.lower()] += span.stop - span.start
    return FileReport(
        file=file,
        layer_ids=list(schema.layer_ids),
        num_hidden_layers=schema.num_hidden_layers,
        num_experts=schema.num_experts,
        top_k=schema.top_k,
        dtype=str(schema.dtype),
        num_samples=len(samples),
        num_rows=sum(sample.record.num_rows for sample in samples),
        num_absent_rows=sum(_num_absent(sample) for sample in samples),
        rows_by_origin=dict(by_origin),
        weight_versions=sorted({span.weight_version for span in spans}),
        layers=[_layer_report(schema, load, index) for index in range(schema.num_layers)],
        samples=[_sample_report(sample) for sample in samples],
    )


def report_lines(report: FileReport) -> list[str]:
    """The report for people."""
    origins = ", ".join(f"{count} {origin}" for origin, count in report.rows_by_origin.items())
    lines = [
        f"{report.file}: {plural(report.num_samples, 'sample')}, {plural(report.num_rows, 'row')}"
        f" ({report.num_absent_rows} absent)",
        f"schema      {len(report.layer_ids)} MoE layers of {report.num_hidden_layers},"
        f" {report.num_experts} experts, top-{report.top_k}, {report.dtype}",
        f"provenance  {origins}; weight versions {report.weight_versions}",
        "",
        "layer  entropy (bits)  of maximum  busiest expert  over mean  unused",
    ]
    lines += [
        f"{layer.layer_id:5}  {layer.entropy_bits:14.3f}  {layer.relative_entropy:9.1%}"
        f"  {layer.busiest_expert:14}  {layer.busiest_over_mean:8.2f}x  {layer.unused_experts:6}"
        for layer in report.layers
    ]
    lines += ["", "sample           positions  prompt  absent  provenance"]
    lines += [_sample_line(index, sample) for index, sample in enumerate(report.samples)]
    return lines


def plural(count: int, noun: str) -> str:
    """The count with its noun, `1 row` or `2 rows`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _sample_line(index: int, sample: SampleReport) -> str:
    spans = " ".join(
        f"{origin}[{start},{stop})v{version}" for start, stop, version, origin in sample.provenance
    )
    positions = f"[{sample.start}, {sample.start + sample.num_rows})"
    name = sample.meta.get("request_id", str(index))
    return f"{name:10}  {positions:>14}  {sample.num_prompt_tokens:6}  {sample.num_absent_rows:6}  {spans}"


def _layer_report(schema: RouteSchema, load: ExpertLoad, index: int) -> LayerReport:
    counts_E = load.counts_LE[index]
    return LayerReport(
        layer_id=schema.layer_ids[index],
        entropy_bits=float(load.entropy[index]),
        relative_entropy=float(load.relative_entropy[index]),
        busiest_expert=int(counts_E.argmax()),
        busiest_over_mean=float(counts_E.max() / counts_E.mean()),
        unused_experts=int((counts_E == 0).sum()),
        counts=counts_E.tolist(),
    )


def _sample_report(sample: RouteSample) -> SampleReport:
    return SampleReport(
        meta=dict(sample.meta),
        num_prompt_tokens=sample.num_prompt_tokens,
        num_tokens=len(sample.token_ids),
        start=sample.record.start,
        num_rows=sample.record.num_rows,
        num_absent_rows=_num_absent(sample),
        provenance=[
            (span.start, span.stop, span.weight_version, span.origin.name.lower())
            for span in sample.record.provenance
        ],
    )


def _num_absent(sample: RouteSample) -> int:
    absent: Any = (~sample.record.valid_T).sum()
    return int(absent)
