"""A picture of expert load: one self-contained HTML page, one row of cells per MoE layer."""

from __future__ import annotations

from html import escape

from routebook.cli.report import FileReport, LayerReport, plural

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Expert load: {file}</title>
<style>
  body {{ font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
         color: #222; background: #fff; }}
  h1 {{ font-size: 1.3rem; }}
  .scroll {{ overflow-x: auto; }}
  table {{ border-collapse: separate; border-spacing: 2px; }}
  th {{ font-weight: 500; padding: 0 .5rem; text-align: right; white-space: nowrap; }}
  th:first-child {{ position: sticky; left: 0; background: #fff; }}
  td.load {{ min-width: 2.2rem; height: 2rem; text-align: center; font-size: .75rem; border-radius: 3px; }}
  th.expert {{ padding: 0; text-align: center; }}
  td.unused {{ outline: 2px solid #c62828; outline-offset: -2px; }}
  td.figure {{ padding: 0 .5rem; text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }}
  .legend span {{ display: inline-block; padding: 0 .6rem; border-radius: 3px; }}
</style>
<h1>Expert load per layer</h1>
<p>{file}: {samples}, {rows} ({num_absent_rows} absent); {num_experts} experts,
top-{top_k}. Each coloured cell is an expert; its number is its load over the layer's mean, so 1.0 is
perfect balance. An outlined cell was never picked. Entropy is given as a share of its maximum.</p>
<p class="legend">{legend}</p>
<div class="scroll"><table>
<tr><th>layer</th><th>entropy</th><th>busiest</th><th>unused</th>{experts}</tr>
{layers}
</table></div>
</html>
"""
_MAX_RATIO = 3.0
_LEGEND_RATIOS = (0.0, 0.5, 1.0, 2.0, _MAX_RATIO)


def render_load(report: FileReport) -> str:
    """The page for a report."""
    return _PAGE.format(
        file=escape(report.file),
        samples=plural(report.num_samples, "sample"),
        rows=plural(report.num_rows, "row"),
        num_absent_rows=report.num_absent_rows,
        num_experts=report.num_experts,
        top_k=report.top_k,
        legend=" ".join(_legend_cell(ratio) for ratio in _LEGEND_RATIOS),
        experts="".join(
            f'<th class="expert">{expert}</th>' for expert in range(report.num_experts)
        ),
        layers="\n".join(_layer_row(layer) for layer in report.layers),
    )


def _layer_row(layer: LayerReport) -> str:
    mean = sum(layer.counts) / len(layer.counts)
    cells = "".join(
        _cell(layer.layer_id, expert, count, count / mean)
        for expert, count in enumerate(layer.counts)
    )
    return (
        f"<tr><th>{layer.layer_id}</th>"
        f'<td class="figure">{layer.relative_entropy:.1%}</td>'
        f'<td class="figure">{layer.busiest_over_mean:.2f}x</td>'
        f'<td class="figure">{layer.unused_experts}</td>{cells}</tr>'
    )


def _cell(layer_id: int, expert: int, count: int, ratio: float) -> str:
    kind = "load" if count else "load unused"
    return (
        f'<td class="{kind}" style="{_style(ratio)}" title="layer {layer_id}, expert {expert}:'
        f' {count} picks">{ratio:.1f}</td>'
    )


def _legend_cell(ratio: float) -> str:
    sign = "\N{GREATER-THAN OR EQUAL TO}" if ratio == _MAX_RATIO else ""
    return f'<span style="{_style(ratio)}">{sign}{ratio:.1f}</span>'


def _style(ratio: float) -> str:
    """Colour of a load: pale below the mean, dark blue far above it."""
    strength = min(ratio / _MAX_RATIO, 1.0)
    lightness = 96 - 66 * strength
    text = "#fff" if lightness < 53 else "#222"
    return f"background:hsl(212 75% {lightness:.0f}%);color:{text}"
