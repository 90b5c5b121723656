"""The charts of runs as figures of matplotlib's; importing this loads it."""

from __future__ import annotations

import io
from collections.abc import Collection

from matplotlib.figure import Figure

from nbddp.archive.comparing import Comparison, Over
from nbddp.charts.palette import rank_color
from nbddp.errors import RequestError
from nbddp.record.finished import RecordedRun
from nbddp.ui.charts.compared import LETTERS, ComparedChart, draw_compared, say_last
from nbddp.ui.charts.drawing import ALERT, INK, Chart
from nbddp.ui.charts.frame import HEIGHT, WIDTH, Scale
from nbddp.ui.charts.paper import (
    BOLD,
    COLUMNS,
    GAP,
    HEAD,
    LARGE,
    Paper,
    blank_figure,
    draw_figure,
    readable,
    whiten,
)

MOST = 12  # charts, unless others are asked for
LINE = 15  # CSS pixels of a line of the legend


def run_figure(run: RecordedRun, metrics: Collection[str] | None = None) -> Figure:
    """The charts of one run's metrics, the first few or those that are named.

    Raises:
        RequestError: it has none of this name, or none at all.
    """
    chosen = RecordedRun(run.path, frozenset(metrics).__contains__) if metrics else run
    store = chosen.metrics()
    missing = [name for name in metrics or () if name not in store.names()]
    if missing:
        store = run.metrics()
    names = store.names()
    if not names:
        raise RequestError(f"run {run.name} has no metrics to draw")
    if missing:
        more = [f"{store.dropped_names:,} more"] if store.dropped_names else []
        known = ", ".join([*names, *more])
        raise RequestError(f"run {run.name} has no metric {missing[0]!r}; its metrics are: {known}")
    return draw_figure([Chart.of(name, store.curves(name)) for name in metrics or names[:MOST]])


def compared_figure(
    comparison: Comparison,
    *,
    over: Over = Over.STEP,
    scale: str = "auto",
    is_smooth: bool = False,
    is_white: bool = True,
) -> Figure:
    """The charts of several runs, and above them which line is whose.

    Raises:
        RequestError: no run has reported a number.
    """
    names = comparison.drawn
    if not names:
        raise RequestError("there is nothing to draw: none of these runs has reported a number")
    columns = min(COLUMNS, len(names))
    wide, high = WIDTH + GAP, HEIGHT + HEAD + GAP
    rows = -(-len(names) // columns)
    top = LINE * len(comparison.runs) + GAP
    figure = blank_figure(columns * wide, rows * high + top)
    if is_white:
        whiten(figure)
    legend = Paper(figure=figure, corner=(0.0, float(rows * high)))
    for index, name in enumerate(comparison.names):
        y = top - LINE * (index + 1)
        text = f"━ {LETTERS[index]}  {readable(name)}"
        legend.text(8, y, text, color=rank_color(index), font=BOLD, size=LARGE)
    for number, name in enumerate(names):
        corner = number % columns * wide, (rows - 1 - number // columns) * high
        paper = Paper(figure=figure, corner=(float(corner[0]), float(corner[1])))
        chart = ComparedChart.of(comparison, name, over, Scale(scale))
        draw_compared(paper, chart, is_smooth=is_smooth)
        _write_head(paper, chart)
    return figure


def _write_head(paper: Paper, chart: ComparedChart) -> None:
    """The metric's name, what has to be said of the picture, and the newest value of each run."""
    y = HEIGHT + HEAD - 17.0
    paper.text(8, y, readable(chart.name)[:40], size=LARGE, font=BOLD)
    color = ALERT if chart.frame.lost else INK
    paper.text(WIDTH - 8, y, " · ".join(chart.facts), align="right", color=color)
    x = 8.0
    for run in chart.runs:
        text = f"{run.letter} {say_last(run)}"
        if x + paper.width_of(text) < WIDTH:
            paper.text(x, HEIGHT + 4.0, text, color=rank_color(run.index))
        x += paper.width_of(text) + 9


def compared_png(
    comparison: Comparison, *, over: Over, scale: str, is_smooth: bool
) -> tuple[bytes, int]:
    """The same on a transparent ground, for light pages and dark ones, and its width in pixels."""
    figure = compared_figure(
        comparison, over=over, scale=scale, is_smooth=is_smooth, is_white=False
    )
    target = io.BytesIO()
    figure.savefig(target, format="png", transparent=True)
    return target.getvalue(), round(figure.get_figwidth() * 100)
