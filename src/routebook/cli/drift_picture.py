"""A plot of drift: one self-contained HTML page with bars per layer, bars of KL, and a map of offsets."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from routebook.replay.drift_report import DriftReport
    from routebook.replay.gap import Gap

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Drift: {title}</title>
<style>
  body {{ font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
         color: #222; background: #fff; }}
  h1 {{ font-size: 1.3rem; }}
  h2 {{ font-size: 1.05rem; margin-top: 2rem; }}
  table {{ border-collapse: collapse; }}
  th {{ font-weight: 500; padding: .1rem .6rem .1rem 0; text-align: right; white-space: nowrap; }}
  td.bar {{ width: 24rem; }}
  td.bar div {{ height: 1rem; background: hsl(212 75% 50%); border-radius: 2px; }}
  td.bar div.replayed {{ background: hsl(150 55% 42%); }}
  td.figure {{ padding-left: .6rem; white-space: nowrap; font-variant-numeric: tabular-nums; }}
  table.map td {{ width: 4rem; height: 2rem; text-align: center; font-variant-numeric: tabular-nums; }}
  p.fault {{ color: #c62828; }}
</style>
<h1>{title}</h1>
<p><strong>{verdict}</strong></p>
{faults}
<h2>KL divergence from the rollout, per sampled token</h2>
<p>Logarithmic: each step of the scale is a factor of ten.</p>
<table>{gaps}</table>
<h2>Rows with other experts than the trainer's own, per layer</h2>
<table>{layers}</table>
<h2>Where the rows would fit</h2>
<p>Share of recorded experts that the trainer chooses as well, if the rows were moved. The middle should be the
largest by far.</p>
<table class="map">{offsets}</table>
</html>
"""
_SMALLEST_KL = 1e-8


def render_drift(title: str, report: DriftReport) -> str:
    """The page for a report."""
    gaps = (
        ("all tokens, native", "native", report.native),
        ("all tokens, replayed", "replayed", report.replayed),
        ("experts differ, native", "native", report.rerouted_native),
        ("experts differ, replayed", "replayed", report.rerouted_replayed),
    )
    largest = max([layer.different for layer in report.layers])
    return _PAGE.format(
        title=escape(title),
        verdict=escape(report.verdict),
        faults="\n".join(f'<p class="fault">{escape(fault.text)}</p>' for fault in report.faults),
        gaps="".join(_gap_row(name, kind, gap) for name, kind, gap in gaps),
        layers="".join(
            _bar_row(
                f"layer {layer.layer_id}",
                "native",
                layer.different / (largest or 1),
                f"{layer.different:.2%}",
            )
            for layer in report.layers
        ),
        offsets=_offset_map(report.offsets),
    )


def _gap_row(name: str, kind: str, gap: Gap) -> str:
    decades = math.log10(max(gap.kl, _SMALLEST_KL) / _SMALLEST_KL)
    span = -math.log10(_SMALLEST_KL) + 1
    return _bar_row(name, kind, min(decades / span, 1.0), f"{gap.kl:.2e} ({gap.num_tokens} tokens)")


def _bar_row(name: str, kind: str, share: float, figure: str) -> str:
    return (
        f'<tr><th>{escape(name)}</th><td class="bar"><div class="{kind}" style="width:{share:.1%}"></div></td>'
        f'<td class="figure">{figure}</td></tr>'
    )


def _offset_map(offsets: list[list[float]]) -> str:
    reach = len(offsets) // 2
    head = "".join(f"<th>layers {by - reach:+d}</th>" for by in range(len(offsets)))
    rows = "".join(
        f"<tr><th>rows {by - reach:+d}</th>{''.join(_offset_cell(share) for share in line)}</tr>"
        for by, line in enumerate(offsets)
    )
    return f"<tr><th></th>{head}</tr>{rows}"


def _offset_cell(share: float) -> str:
    lightness = 96 - 56 * share
    colour = "#fff" if lightness < 60 else "#222"
    return f'<td style="background:hsl(212 75% {lightness:.0f}%);color:{colour}">{share:.0%}</td>'
