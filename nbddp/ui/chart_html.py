"""A chart as HTML: its name, a key for each line, the picture, and tooltips.

A page that removes styles and SVG still shows the name, the keys and the chart as an image. Ticks
and tooltips are in attributes, which such a page removes too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from nbddp.archive.comparison import format_last
from nbddp.charts.axes import AxisScale, format_number
from nbddp.charts.chart_lines import MANY_RANKS, Chart, ChartLine, Numbers, rank_chart
from nbddp.charts.palette import rank_class
from nbddp.charts.sparkline import svg_source
from nbddp.charts.svg import HEIGHT, WIDTH, Frame, Label, draw
from nbddp.record.metrics import MetricsSnapshot
from nbddp.ui.html_pieces import escape, text_color
from nbddp.ui.wording import describe_left_out

logger = logging.getLogger(__name__)

MAX_NAMED = 20  # metrics without a chart
MAX_TOOLTIPS = 60  # of a chart
TOOLTIP_REACH = 0.03  # of the steps: a tooltip shows a line if it has a point this near
CHART_STYLE = (  # for pages that remove the style sheet
    f"display:inline-block;vertical-align:top;width:{WIDTH}px;max-width:100%;margin:0 10px 8px 0"
)

_SWITCH = (
    '<input type="checkbox" hidden="hidden" class="nbddp-switch" aria-label="smooth"{checked}>'
)


def metrics_html(metrics: MetricsSnapshot, scale: AxisScale = AxisScale.AUTO) -> str:
    """Render the charts of a record, and name the metrics without a chart."""
    charts, notes = [], _note_left_out(metrics)
    for name, curves in metrics.curves.items():
        try:
            charts.append(render(rank_chart(name, curves, scale)))
        except Exception as error:  # draw the others
            logger.exception("the chart of %r could not be drawn", name)
            notes.append(f"{name} could not be drawn: {type(error).__name__}: {error}")
    said = "".join(f'<div class="nbddp-muted">{escape(note)}</div>' for note in notes)
    return charts_html(charts) + said


def metrics_text(metrics: MetricsSnapshot) -> list[str]:
    """Describe each chart in a line, and name the metrics without a chart."""
    charts = [rank_chart(name, curves) for name, curves in metrics.curves.items()]
    return [*(chart.text for chart in charts), *_note_left_out(metrics)]


def _note_left_out(metrics: MetricsSnapshot) -> list[str]:
    count = metrics.left_out
    return (
        [describe_left_out(metrics.others[:MAX_NAMED], count, does="draws them")] if count else []
    )


def charts_html(charts: Sequence[str], *, is_smooth: bool = False) -> str:
    """Put rendered charts next to each other, with a switch for smooth lines."""
    shown = "".join(charts)
    switch = _SWITCH.format(checked=' checked="checked"' if is_smooth else "")
    switch = switch if "<svg" in shown else ""
    return f'<div class="nbddp-charts nbddp-columns">{switch}{shown}</div>' if shown else ""


def render(chart: Chart, *, is_live: bool = False) -> str:
    """Render a chart as HTML.

    A chart of a record also has an image, for pages that remove SVG. There, a metric that was
    reported once is only a number.
    """
    if not is_live and chart.lines and all(len(line.steps) <= 1 for line in chart.lines):
        values = {at: float(line.values[-1]) for at, line in enumerate(chart.lines)}
        head = _head(chart, format_last(values))
        return f'<div class="nbddp-chart" style="{CHART_STYLE}">{head}</div>'
    frame = Frame(chart)
    canvas, text = draw(chart, frame), escape(chart.text)
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    image = f'<img class="nbddp-image" alt="{escape(chart.name)}" title="{text}" {size}'
    image = "" if is_live else f'{image} src="{svg_source(canvas.picture())}">'
    ticks = "".join(map(_tick, canvas.labels))
    tooltips = "".join(map(_tooltip, tooltips_of(chart, frame)))
    value = "" if chart.value is None else format_number(chart.value)
    return (
        f'<div class="nbddp-chart" style="{CHART_STYLE}">{_head(chart, value)}{_legend(chart)}'
        f'<div class="nbddp-plot">{image}{canvas.inline(text)}{ticks}'
        f"{tooltips}</div></div>"
    )


def _head(chart: Chart, value: str) -> str:
    is_bad = chart.value is not None and not isfinite(chart.value)
    color = f' class="nbddp-wrong" style="{text_color("bad")}"' if is_bad else ""
    shown = f" <strong{color}>{value}</strong>" if value else ""
    for fact in chart.facts:
        look = 'nbddp-fact"'
        if not fact.startswith("log scale"):
            look = f'nbddp-fact nbddp-wrong" style="{text_color("bad")}"'
        shown += f' <span class="{look}>{escape(fact)}</span>'
    name = escape(chart.name)
    return f'<div class="nbddp-name" title="{name}"><span>{name}</span>{shown}</div>'


def _legend(chart: Chart) -> str:
    """Return the legend. The line of a key is highlighted while the pointer is over the key."""
    first = ""
    if chart.legend:
        color = chart.drawn[-1].color
        kind = "" if color is None else f' class="{rank_class(color)}"'
        style = f"font-size:11px;color:{chart.drawn[-1].css_color}" if kind else "font-size:11px"
        first = f'<span{kind} style="{style}"><strong>━ {chart.legend}</strong></span> '
    if len(chart.lines) > MANY_RANKS:
        band = "the band goes from the lowest to the highest; two ranks have a line of their own"
        first += f'<span style="font-size:11px" title="{band}">▒ all</span> '
    lines = chart.drawn if not chart.legend or len(chart.lines) > 1 else ()
    for line in lines:
        if line.color is not None:
            look = f'style="font-size:11px;color:{line.css_color}"'
            known = f'class="nbddp-key {rank_class(line.color)}" tabindex="0" title="{line.label}"'
            first += f"<span {known} {look}>━ {line.key}</span> "
    return first


def _tick(label: Label) -> str:
    """Return the text of a tick."""
    place = f"left:{label.x / WIDTH:.1%};top:{label.y / HEIGHT:.1%}"
    return f'<s class="nbddp-{label.align}" style="{place}" data-t="{escape(label.text)}"></s>'


# ---- tooltips


@dataclass(frozen=True, slots=True)
class Tooltip:
    """A column over the chart, in CSS pixels, with the text for the step at ``at`` in it."""

    left: float
    width: float
    at: float
    text: str


def _tooltip(tip: Tooltip) -> str:
    side = " nbddp-l" if tip.left > WIDTH / 2 else ""
    place = f"left:{tip.left / WIDTH:.2%};width:{tip.width / WIDTH:.2%}"
    at = f"--at:{tip.at / max(tip.width, 1e-9):.0%}"
    return f'<i class="nbddp-tip{side}" style="{place};{at}" data-t="{escape(tip.text)}"></i>'


def tooltips_of(chart: Chart, frame: Frame) -> list[Tooltip]:
    """Return tooltips that cover the chart, from left to right."""
    if not chart.lines:
        return []
    steps = np.unique(np.concatenate([line.steps for line in chart.lines]))
    if len(steps) > MAX_TOOLTIPS:
        wanted = np.linspace(*chart.steps, MAX_TOOLTIPS)
        steps = np.unique(steps[np.searchsorted(steps, wanted).clip(0, len(steps) - 1)])
    places = frame.x_pixels(steps)
    edges = np.concatenate([[frame.left], (places[1:] + places[:-1]) / 2, [frame.right]])
    near = TOOLTIP_REACH * chart.span
    mean = [line for line in chart.drawn if line.color is None]
    known = [(line, _values(line, steps, near)) for line in (*mean, *chart.lines)]
    found = []
    for at, step in enumerate(steps.tolist()):
        here = [(line, values[at]) for line, values in known]
        there = [(line, value) for line, value in here if value is not None]
        where = f"{format_number(step)} s" if chart.unit == "s" else f"{chart.unit} {step:.0f}"
        text = "\n".join([where, *_rows(there)])
        left, width = edges[at], edges[at + 1] - edges[at]
        found.append(Tooltip(float(left), float(width), float(places[at] - left), text))
    return found


def _rows(here: Sequence[tuple[ChartLine, float]]) -> Iterator[str]:
    """Return the mean and each line; of many lines the lowest and the highest."""
    lines = [(line, value) for line, value in here if line.color is not None]
    for line, value in here:
        if line.color is None:
            yield f"mean  {_format_value(value)}"
        elif len(lines) <= MANY_RANKS:
            yield f"{line.label}  {_format_value(value)}"
    numbers = sorted((value, line.label) for line, value in lines if isfinite(value))
    if numbers and len(lines) > MANY_RANKS:
        for name, (value, label) in (("lowest", numbers[0]), ("highest", numbers[-1])):
            yield f"{name}  {_format_value(value)} ({label})"


def _values(line: ChartLine, steps: Numbers, near: float) -> list[float | None]:
    """Return the value at the nearest point to each step; None if no point is near."""
    at = np.searchsorted((line.steps[1:] + line.steps[:-1]) / 2, steps)
    is_near = np.abs(line.steps[at] - steps) <= near
    found = zip(line.values[at].tolist(), is_near.tolist(), strict=True)
    return [value if is_there else None for value, is_there in found]


def _format_value(value: float) -> str:
    return format_number(value) if isfinite(value) else "not finite"
