"""A metric of several runs as one chart: each run a line, with a band over its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nbddp.archive.comparing import Compared, Comparison, Mark, Over
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

LETTERS = "ABCDEFGH"
UNITS = {Over.STEP: "step", Over.SAMPLES: "samples", Over.TIME: "s"}


def compared_chart(
    comparison: Comparison, name: str, over: Over, scale: AxisScale = AxisScale.AUTO
) -> Chart:
    """Make the chart of a metric; runs that have none of it have no line."""
    lines = tuple(
        line
        for index, run in enumerate(comparison.runs)
        if (line := _line(index, run, name, over)) is not None
    )
    marks = [mark for line in lines for mark in _marks(line, comparison, over)]
    return Chart(
        name=name,
        lines=lines,
        drawn=lines,
        marks=tuple(marks),
        is_log=is_log(lines, scale),
        unit=UNITS[over],
    )


def _line(index: int, run: Compared, name: str, over: Over) -> ChartLine | None:
    ranks = rank_lines(run.curves(name, over))
    if not ranks:
        return None
    line = ranks[0] if len(ranks) == 1 else mean_line(ranks)
    letter, last = LETTERS[index], newest(ranks)
    key = letter if last is None else f"{letter} {format_number(last)}"
    return replace(line, label=letter, key=key, color=index, is_strong=True)


def _marks(line: ChartLine, comparison: Comparison, over: Over) -> Iterator[ChartMark]:
    """Where the run of a line was taken up again."""
    run = comparison.runs[line.color or 0]
    for mark in run.marks:
        at = _at(mark, run, over)
        if at is not None:
            yield ChartMark(at, mark.kind == "heal", line.color)


def _at(mark: Mark, run: Compared, over: Over) -> float | None:
    if over is Over.TIME:
        return mark.seconds
    if mark.step is None or over is Over.STEP:
        return mark.step
    return (mark.step + 1) * (run.samples_per_step or 0.0)


def compared_charts(comparison: Comparison, over: Over, scale: AxisScale) -> list[Chart]:
    """Make the charts of all metrics that are lines.

    Raises:
        RequestError: no run has reported a number.
    """
    if not comparison.drawn:
        raise RequestError("there is nothing to draw: none of these runs has reported a number")
    return [compared_chart(comparison, name, over, scale) for name in comparison.drawn]
