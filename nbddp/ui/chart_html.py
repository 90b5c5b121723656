"""A chart as HTML: its name, a legend, the picture, and tooltips.

A page that removes styles and SVG still shows the name, the legend and an image of the chart. Such
a page also removes attributes, and with them the ticks and the tooltips.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from nbddp.charts.axes import AxisScale, format_number
from nbddp.charts.chart_lines import MANY_RANKS, Chart, ChartLine, Numbers, rank_chart
from nbddp.charts.palette import rank_class
from nbddp.charts.sparkline import svg_source
from nbddp.charts.svg import HEIGHT, WIDTH, Frame, Label, draw
from nbddp.record.metrics import MetricsSnapshot
from nbddp.ui.html_pieces import escape, text_color
from nbddp.ui.wording import format_last, note_hidden_metrics

logger = logging.getLogger(__name__)

MAX_TOOLTIPS = 60  # for each chart
TOOLTIP_REACH = 0.03  # fraction of the steps; a tooltip lists the lines with a point this near
CHART_STYLE = (  # for pages that remove the style sheet
    f"display:inline-block;vertical-align:top;width:{WIDTH}px;max-width:100%;margin:0 10px 8px 0"
)

_SWITCH = (
    '<input type="checkbox" hidden="hidden" class="nbddp-switch" aria-label="smooth"{checked}>'
)


def metrics_html(metrics: MetricsSnapshot, scale: AxisScale = AxisScale.AUTO) -> str:
    """Render the charts of a record, and name the metrics that have no chart."""
    charts, notes = [], note_hidden_metrics(metrics.hidden_names, metrics.hidden)
    for name, curves in metrics.curves.items():
        try:
            charts.append(render(rank_chart(name, curves, scale)))
        except Exception as error:  # the other charts can still be drawn
            logger.exception("the chart of %r could not be drawn", name)
            notes.append(f"{name} could not be drawn: {type(error).__name__}: {error}")
    note_lines = "".join(f'<div class="nbddp-muted">{escape(note)}</div>' for note in notes)
    return charts_html(charts) + note_lines


def metrics_text(metrics: MetricsSnapshot) -> list[str]:
    """Describe each chart in one line, and name the metrics that have no chart."""
    texts = [rank_chart(name, curves).text for name, curves in metrics.curves.items()]
    return [*texts, *note_hidden_metrics(metrics.hidden_names, metrics.hidden)]


def charts_html(charts: Sequence[str], *, is_smooth: bool = False) -> str:
    """Join rendered charts, and add a switch for smooth lines."""
    joined = "".join(charts)
    switch = _SWITCH.format(checked=' checked="checked"' if is_smooth else "")
    switch = switch if "<svg" in joined else ""
    return f'<div class="nbddp-charts nbddp-columns">{switch}{joined}</div>' if joined else ""


def render(chart: Chart, *, is_live: bool = False) -> str:
    """Render a chart as HTML.

    A chart in a record also has an image, for pages that remove SVG. A metric that was reported
    once has no chart in a record, only a number.
    """
    if not is_live and chart.lines and all(len(line.steps) <= 1 for line in chart.lines):
        values = {at: float(line.values[-1]) for at, line in enumerate(chart.lines)}
        head = _head(chart, format_last(values))
        return f'<div class="nbddp-chart" style="{CHART_STYLE}">{head}</div>'
    frame = Frame(chart)
    drawing, text = draw(chart, frame), escape(chart.text)
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    image = f'<img class="nbddp-image" alt="{escape(chart.name)}" title="{text}" {size}'
    image = "" if is_live else f'{image} src="{svg_source(drawing.picture())}">'
    ticks = "".join(map(_tick, drawing.labels))
    tooltips = "".join(map(_tooltip, tooltips_of(chart, frame)))
    value = "" if chart.value is None else format_number(chart.value)
    return (
        f'<div class="nbddp-chart" style="{CHART_STYLE}">{_head(chart, value)}{_legend(chart)}'
        f'<div class="nbddp-plot">{image}{drawing.inline(text)}{ticks}'
        f"{tooltips}</div></div>"
    )


def _head(chart: Chart, value: str) -> str:
    is_bad = chart.value is not None and not isfinite(chart.value)
    value_style = f' class="nbddp-wrong" style="{text_color("bad")}"' if is_bad else ""
    html = f" <strong{value_style}>{value}</strong>" if value else ""
    for fact in chart.facts:
        attributes = 'nbddp-fact"'
        if not fact.startswith("log scale"):
            attributes = f'nbddp-fact nbddp-wrong" style="{text_color("bad")}"'
        html += f' <span class="{attributes}>{escape(fact)}</span>'
    name = escape(chart.name)
    return f'<div class="nbddp-name" title="{name}"><span>{name}</span>{html}</div>'


def _legend(chart: Chart) -> str:
    """Return the legend. The page highlights a line while the pointer is over its key."""
    html = ""
    if chart.legend:
        color = chart.drawn[-1].color
        kind = "" if color is None else f' class="{rank_class(color)}"'
        style = f"font-size:11px;color:{chart.drawn[-1].css_color}" if kind else "font-size:11px"
        html = f'<span{kind} style="{style}"><strong>━ {chart.legend}</strong></span> '
    if len(chart.lines) > MANY_RANKS:
        band = "the band goes from the lowest to the highest; two ranks have a line of their own"
        html += f'<span style="font-size:11px" title="{band}">▒ all</span> '
    lines = chart.drawn if not chart.legend or len(chart.lines) > 1 else ()
    for line in lines:
        if line.color is not None:
            style = f'style="font-size:11px;color:{line.css_color}"'
            key = f'class="nbddp-key {rank_class(line.color)}" tabindex="0" title="{line.label}"'
            html += f"<span {key} {style}>━ {line.key}</span> "
    return html


def _tick(label: Label) -> str:
    """Return the label of a tick."""
    style = f"left:{label.x / WIDTH:.1%};top:{label.y / HEIGHT:.1%}"
    return f'<s class="nbddp-{label.anchor}" style="{style}" data-t="{escape(label.text)}"></s>'


# ---- tooltips


@dataclass(frozen=True, slots=True)
class Tooltip:
    """A column of the chart, in CSS pixels, with a text for the step at ``at`` in the column."""

    x: float
    width: float
    at: float
    text: str


def _tooltip(tip: Tooltip) -> str:
    side = " nbddp-l" if tip.x > WIDTH / 2 else ""
    style = f"left:{tip.x / WIDTH:.2%};width:{tip.width / WIDTH:.2%}"
    at = f"--at:{tip.at / max(tip.width, 1e-9):.0%}"
    return f'<i class="nbddp-tip{side}" style="{style};{at}" data-t="{escape(tip.text)}"></i>'


def tooltips_of(chart: Chart, frame: Frame) -> Iterator[Tooltip]:
    """Yield tooltips from left to right that cover the whole chart."""
    if not chart.lines:
        return
    steps = np.unique(np.concatenate([line.steps for line in chart.lines]))
    if len(steps) > MAX_TOOLTIPS:
        wanted = np.linspace(*chart.steps, MAX_TOOLTIPS)
        steps = np.unique(steps[np.searchsorted(steps, wanted).clip(0, len(steps) - 1)])
    pixels = frame.x_pixels(steps)
    edges = np.concatenate([[frame.left], (pixels[1:] + pixels[:-1]) / 2, [frame.right]])
    near = TOOLTIP_REACH * chart.span
    mean = [line for line in chart.drawn if line.color is None]
    values_by_line = [(line, _values(line, steps, near)) for line in (*mean, *chart.lines)]
    unit = chart.x_unit
    for at, step in enumerate(steps.tolist()):
        here = [(line, values[at]) for line, values in values_by_line]
        present = [(line, value) for line, value in here if value is not None]
        at_step = f"{format_number(step)} s" if unit == "s" else f"{unit} {step:.0f}"
        text = "\n".join([at_step, *_rows(present, chart.why_not_drawn)])
        start, width = edges[at], edges[at + 1] - edges[at]
        yield Tooltip(float(start), float(width), float(pixels[at] - start), text)


def _rows(values: Sequence[tuple[ChartLine, float]], why_not: str) -> Iterator[str]:
    """Yield a row for the mean and for each line; of many lines, only the lowest and highest.

    Args:
        values: the lines and their values.
        why_not: what to say about a value that is not drawn.
    """
    lines = [(line, value) for line, value in values if line.color is not None]
    for line, value in values:
        if line.color is None or len(lines) <= MANY_RANKS:
            yield f"{line.label}  {format_number(value) if isfinite(value) else why_not}"
    numbers = sorted((value, line.label) for line, value in lines if isfinite(value))
    if numbers and len(lines) > MANY_RANKS:
        for name, (value, label) in (("lowest", numbers[0]), ("highest", numbers[-1])):
            yield f"{name}  {format_number(value)} ({label})"


def _values(line: ChartLine, steps: Numbers, near: float) -> list[float | None]:
    """Return the value at the point nearest to each step; None if no point is near."""
    at = np.searchsorted((line.steps[1:] + line.steps[:-1]) / 2, steps)
    is_near = np.abs(line.steps[at] - steps) <= near
    pairs = zip(line.values[at].tolist(), is_near.tolist(), strict=True)
    return [value if is_close else None for value, is_close in pairs]
