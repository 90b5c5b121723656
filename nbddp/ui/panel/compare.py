"""Runs beside each other on a page that stays as it is: tables, charts, and the code as a diff."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence

from nbddp.archive.compared_chart import compared_charts
from nbddp.archive.comparing import Comparison, Over
from nbddp.charts.axes import AxisScale
from nbddp.charts.palette import rank_class, rank_color
from nbddp.ui.chart_html import charts_html, render
from nbddp.ui.panel.html import escape
from nbddp.ui.panel.runs import run_name
from nbddp.ui.panel.style import SHEET
from nbddp.ui.text.compare import (
    code_titles,
    difference_rows,
    final_head,
    final_rows,
    letters,
    notes,
)

DIFF_LINES = 400  # of each run
_DIFF_SHEET = """<style>
.nbddp-add { color: var(--nbddp-ok); } .nbddp-del { color: var(--nbddp-bad); }
</style>"""


def compare_bundle(
    comparison: Comparison,
    *,
    text: str,
    over: Over,
    scale: str,
    is_smooth: bool,
    has_page: bool,
) -> tuple[dict[str, str], dict[str, object]]:
    """What is published, by MIME type, and its metadata.

    ``has_page``: whether a page shows it, or a notebook is executed without one.
    """
    if has_page:
        html = compare_html(comparison, over=over, scale=AxisScale(scale), is_smooth=is_smooth)
        return {"text/html": html, "text/plain": text}, {}
    if not comparison.metrics:
        return {"text/plain": text}, {}
    from nbddp.charts.figure import draw_charts, png_of  # loads matplotlib

    charts = compared_charts(comparison, over, AxisScale(scale))
    png, width = png_of(draw_charts(charts, names=comparison.names, is_smooth=is_smooth))
    picture = b64encode(png).decode()
    return {"image/png": picture, "text/plain": text}, {"image/png": {"width": width}}


def compare_html(
    comparison: Comparison,
    *,
    over: Over = Over.STEP,
    scale: AxisScale = AxisScale.AUTO,
    is_smooth: bool = False,
) -> str:
    """The comparison, with curves over steps, samples or time."""
    parts = [
        SHEET,
        _DIFF_SHEET,
        '<div class="nbddp">',
        _finals(comparison),
        _charts(comparison, over, scale, is_smooth=is_smooth),
        _differences(comparison),
        *(_code(title, diff) for title, diff in code_titles(comparison)),
        *(f'<div class="nbddp-muted">{escape(each)}</div>' for each in notes(comparison)),
        "</div>",
    ]
    return "".join(parts)


def _finals(comparison: Comparison) -> str:
    rows = []
    for index, (letter, name, *rest) in enumerate(final_rows(comparison)):
        shown = run_name(comparison.runs[index].name, name)
        rows.append([_name(index, letter), shown, *map(escape, rest)])
    return _table(final_head(comparison), rows, label="what the runs came to")


def _differences(comparison: Comparison) -> str:
    rows = [[*map(escape, row)] for row in difference_rows(comparison)]
    if not rows:
        return '<div class="nbddp-muted">settings, versions and world size are the same</div>'
    return _table(["differs", *letters(comparison)], rows, label="in what the runs differ")


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, label: str) -> str:
    """Cells are HTML already."""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in titles)
    body = "".join("<tr>" + "".join(f"<td>{each}</td>" for each in row) + "</tr>" for row in rows)
    return (
        f'<table class="nbddp-ranks" aria-label="{label}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )


def _name(index: int, text: str) -> str:
    """In the run's colour."""
    color = f"color:{rank_color(index)};font-weight:600"
    return f'<span class="{rank_class(index)}" style="{color}">━ {escape(text)}</span>'


def _code(title: str, diff: Sequence[str]) -> str:
    kinds = {"+": "nbddp-add", "-": "nbddp-del"}
    lines = [
        f'<span class="{kinds.get(line[:1], "nbddp-muted")}">{escape(line)}</span>'
        for line in diff[2 : DIFF_LINES + 2]
    ]
    more = len(diff) - 2 - DIFF_LINES
    rest = f"\n... {more} lines more" if more > 0 else ""
    text = "\n".join(lines) + rest
    return (
        f"<details open><summary>{escape(title)}</summary>"
        f'<div class="jp-RenderedText"><pre>{text}</pre></div></details>'
    )


def _charts(comparison: Comparison, over: Over, scale: AxisScale, *, is_smooth: bool) -> str:
    if not comparison.metrics:
        return '<div class="nbddp-muted">no numbers were reported</div>'
    charts = compared_charts(comparison, over, scale)
    return charts_html([render(chart) for chart in charts], is_smooth=is_smooth)
