"""Draw a metric of several runs as one chart: a line for each run, with a band over its ranks."""

from __future__ import annotations

from dataclasses import replace

from nbddp.charts.axes import AxisScale, format_number
from nbddp.charts.chart_lines import (
    Chart,
    ChartLine,
    ChartMark,
    is_log,
    mean_line,
    newest,
    rank_lines,
)
from nbddp.errors import RequestError
from nbddp.extensions.runs import XAxis
from nbddp.extensions.runs.comparison import ComparedRun, Comparison

UNITS = {XAxis.STEP: "step", XAxis.SAMPLES: "samples", XAxis.TIME: "s"}


def compared_chart(
    comparison: Comparison, name: str, over: XAxis, scale: AxisScale = AxisScale.AUTO
) -> Chart:
    """Build the chart of a metric; runs without the metric have no line."""
    labelled = enumerate(zip(comparison.labels, comparison.runs, strict=True))
    found = [_line(index, label, run, name, over) for index, (label, run) in labelled]
    lines = tuple(line for line in found if line is not None)
    marks = tuple(
        ChartMark(at, is_heal, line.color)
        for line in lines
        for at, is_heal in comparison.runs[line.color or 0].resume_marks(over)
    )
    log, unit = is_log(lines, scale), UNITS[over]
    return Chart(name=name, lines=lines, drawn=lines, marks=marks, is_log=log, x_unit=unit)


def _line(index: int, label: str, run: ComparedRun, name: str, over: XAxis) -> ChartLine | None:
    ranks = rank_lines(run.curves(name, over))
    if not ranks:
        return None
    line = ranks[0] if len(ranks) == 1 else mean_line(ranks)
    last = newest(ranks)
    key = label if last is None else f"{label} {format_number(last)}"
    return replace(line, label=label, key=key, color=index, is_strong=True)


def compared_charts(comparison: Comparison, over: XAxis, scale: AxisScale) -> list[Chart]:
    """Build the charts of all metrics that are drawn as lines.

    Raises:
        RequestError: no run has reported a number.
    """
    if not comparison.drawn:
        raise RequestError("there is nothing to draw: none of these runs has reported a number")
    return [compared_chart(comparison, name, over, scale) for name in comparison.drawn]
