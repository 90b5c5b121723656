"""`%ddp compare`: the results of several runs, and their differences."""

from __future__ import annotations

from collections.abc import Iterator

from nbddp.charts.axes import AxisScale
from nbddp.charts.sparkline import block_characters
from nbddp.extensions.runs import XAxis
from nbddp.extensions.runs.comparison import ComparedRun, Comparison
from nbddp.extensions.runs.run_list_view import describe_outcome, describe_pace, midpoints, shorten
from nbddp.formatting import format_seconds, plural
from nbddp.ui.html_pieces import escape
from nbddp.ui.report.blocks import Block, Cell, Code, Details, Picture, Report, Table, note
from nbddp.ui.wording import align_columns

DIFF_LINES = 400  # for each run
MAX_VALUE_LENGTH = 60  # characters of a value in a text
SAME_CODE = "the code of all cells is the same"


def comparison_report(
    comparison: Comparison,
    *,
    over: XAxis = XAxis.STEP,
    scale: AxisScale = AxisScale.AUTO,
    is_smooth: bool = False,
) -> Report:
    """Report final values, curves, differences in settings, and diffs of the code."""
    return Report(
        f"comparison of {plural(len(comparison.runs), 'run')}",
        [
            _final_values(comparison),
            _charts(comparison, over, scale, is_smooth=is_smooth),
            _differences(comparison),
            *_code(comparison),
            *map(note, _notes(comparison)),
        ],
    )


def _final_values(comparison: Comparison) -> Table:
    head = ["line", "run", *comparison.metrics, "steps", "pace", "time", "outcome"]
    rows: list[list[str | Cell]] = [
        [
            Cell(label, rank=index, html=f"━ {escape(label)}"),
            Cell(name, title=run.name),
            *comparison.final_values(run),
            *_totals(run),
        ]
        for index, (label, name, run) in enumerate(
            zip(comparison.labels, comparison.names, comparison.runs, strict=True)
        )
    ]
    return Table(head, rows, "results of the runs")


def _totals(run: ComparedRun) -> list[str]:
    summary = run.summary
    steps = "" if summary.steps is None else f"{summary.steps:,}"
    seconds = run.metrics().ended - run.metrics().began
    duration = format_seconds(seconds) if seconds > 0 else ""
    return [steps, describe_pace(summary), duration, describe_outcome(summary)]


def _charts(comparison: Comparison, over: XAxis, scale: AxisScale, *, is_smooth: bool) -> Block:
    if not comparison.metrics:
        return note("no metrics were reported")

    def png() -> tuple[bytes, int]:
        from nbddp.charts.figure import draw_charts, png_of  # loads matplotlib
        from nbddp.extensions.runs.compared_chart import compared_charts

        charts = compared_charts(comparison, over, scale)
        return png_of(draw_charts(charts, names=comparison.legend, is_smooth=is_smooth))

    def html() -> str:
        from nbddp.extensions.runs.compared_chart import compared_charts  # loads numpy
        from nbddp.ui.chart_html import charts_html, render

        charts = compared_charts(comparison, over, scale)
        return charts_html([render(chart) for chart in charts], is_smooth=is_smooth)

    text = "\n\n".join(_curves(comparison, name) for name in comparison.drawn)
    return Picture(png, f"curves of {', '.join(comparison.drawn)}", text, html)


def _curves(comparison: Comparison, name: str) -> str:
    runs = zip(comparison.labels, comparison.runs, strict=True)
    rows = [[label, block_characters(midpoints(run.coarse_curve(name)))] for label, run in runs]
    return "\n".join([name, *align_columns(rows)])


def _differences(comparison: Comparison) -> Block:
    differ = comparison.differences()
    rows: list[list[str | Cell]] = [[name, *map(_value, values)] for name, values in differ]
    if not rows:
        return note("settings, versions and world size are the same")
    return Table(["differs", *comparison.labels], rows, "differences between the runs")


def _value(value: str) -> Cell:
    """Return a cell with the whole value on a page, and a shortened value in text."""
    return Cell(shorten(" ".join(value.split()), MAX_VALUE_LENGTH), html=escape(value))


def _code(comparison: Comparison) -> Iterator[Details]:
    """Yield the diff from the first run to each other run."""
    for index, diff in enumerate(comparison.code_diffs):
        if not diff:  # as for the first run
            continue
        added = sum(line.startswith("+") for line in diff[2:])
        removed = sum(line.startswith("-") for line in diff[2:])
        first, label = comparison.labels[0], comparison.labels[index]
        title = f"code from {first} to {label}: {plural(added, 'line')} added, {removed} removed"
        shown = diff[: DIFF_LINES + 2]
        if more := len(diff) - len(shown):
            shown = [*shown, f"... {more} lines more"]
        yield Details(title, [Code("\n".join(shown), is_diff=True)], is_open=True)


def _notes(comparison: Comparison) -> list[str]:
    notes = [
        f"run {name} has no recorded cells: its code is not compared"
        for name, run in zip(comparison.names, comparison.runs, strict=True)
        if not run.cells
    ]
    is_compared = comparison.runs[0].cells and len(notes) < len(comparison.runs) - 1
    if is_compared and not any(comparison.code_diffs):
        notes.append(SAME_CODE if not notes else "the code of the others is the same")
    if any(any(run.resume_marks(XAxis.TIME)) for run in comparison.runs):
        notes.append("marks in a chart: orange is a restart, green a heal")
    if comparison.left_out:
        more = plural(comparison.left_out, "metric")
        notes.append(f"{more} more: choose them with --metrics NAME,...")
    unreadable = [run.name for run in comparison.runs if run.unreadable]
    return [*notes, *(f"some lines of run {name} are not readable" for name in unreadable)]
