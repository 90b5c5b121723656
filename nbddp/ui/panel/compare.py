"""Runs beside each other on a page that stays as it is: tables, charts, and the code as a diff."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence

from nbddp.archive.comparing import Comparison, Over
from nbddp.charts.palette import rank_class, rank_color
from nbddp.ui.charts.compared import LETTERS, ComparedChart, RunLine, draw_compared, say_last
from nbddp.ui.charts.drawing import ALERT
from nbddp.ui.charts.frame import Scale
from nbddp.ui.charts.svg import SvgSheet
from nbddp.ui.charts.tips import tips_by_name
from nbddp.ui.panel.charthtml import INLINE, highlighting, image_of, tick, tip
from nbddp.ui.panel.charthtml import SHEET as CHART_SHEET
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
_AXIS_SHEET = """<style>
.nbddp-over { display: none !important; }
.nbddp-axis-step:checked ~ .nbddp-chart .nbddp-at-step,
.nbddp-axis-samples:checked ~ .nbddp-chart .nbddp-at-samples,
.nbddp-axis-time:checked ~ .nbddp-chart .nbddp-at-time { display: block !important; }
.nbddp-axis:checked ~ .nbddp-chart .nbddp-plot:not(.nbddp-over) { display: none !important; }
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
        html = compare_html(comparison, over=over, scale=Scale(scale), is_smooth=is_smooth)
        return {"text/html": html, "text/plain": text}, {}
    if not comparison.metrics:
        return {"text/plain": text}, {}
    from nbddp.ui.charts.figures import compared_png  # loads matplotlib

    png, width = compared_png(comparison, over=over, scale=scale, is_smooth=is_smooth)
    picture = b64encode(png).decode()
    return {"image/png": picture, "text/plain": text}, {"image/png": {"width": width}}


def compare_html(
    comparison: Comparison,
    *,
    over: Over = Over.STEP,
    scale: Scale = Scale.AUTO,
    is_smooth: bool = False,
) -> str:
    """The comparison; ``over`` is what is shown first, the page has the other axes, too."""
    parts = [
        SHEET,
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


# ---- the charts


def _charts(comparison: Comparison, over: Over, scale: Scale, *, is_smooth: bool) -> str:
    if not comparison.metrics:
        return '<div class="nbddp-muted">no numbers were reported</div>'
    first = over if over in comparison.axes else Over.STEP
    axes = [first, *(each for each in comparison.axes if each is not first)]
    shown = "".join(_chart(comparison, name, axes, scale) for name in comparison.drawn)
    sheet = f"{CHART_SHEET}{_AXIS_SHEET}<style>{highlighting(range(len(comparison.runs)))}</style>"
    end_of_row = '<span class="nbddp-end"></span>'
    smooth = " nbddp-is-smooth" if is_smooth else ""
    return f'{sheet}<div class="nbddp-charts{smooth}">{_switches(axes)}{end_of_row}{shown}</div>'


def _switches(axes: Sequence[Over]) -> str:
    """What turns the charts without a kernel."""
    kinds = [(f"axis nbddp-axis-{each.value}", f"over {each.value}") for each in axes[1:]]
    return "".join(
        f'<input type="checkbox" hidden="hidden" class="nbddp-switch nbddp-{kind}"'
        f' aria-label="{said}">'
        for kind, said in [*kinds, ("smoothing", "smooth")]
    )


def _chart(comparison: Comparison, name: str, axes: Sequence[Over], scale: Scale) -> str:
    charts = [ComparedChart.of(comparison, name, over, scale) for over in axes]
    plots = "".join(_plot(chart, is_first=not number) for number, chart in enumerate(charts))
    keys = "".join(map(_key, charts[0].runs))
    facts = "".join(map(_fact, charts[0].facts))
    said = escape(name)
    head = f'<div class="nbddp-name" title="{said}"><strong>{said}</strong>{facts}</div>'
    return f'<div class="nbddp-chart" style="{INLINE}">{head}{keys}{plots}</div>'


def _fact(fact: str) -> str:
    is_scale = fact.endswith("scale")
    color = "" if is_scale else f' style="color:{ALERT}"'
    kind = "nbddp-fact" if is_scale else "nbddp-fact nbddp-wrong"
    return f' <span class="{kind}"{color}>{escape(fact)}</span>'


def _key(run: RunLine) -> str:
    return (
        f'<span class="nbddp-key k{run.index} {rank_class(run.index)}" tabindex="0"'
        f' title="run {run.letter}" style="font-size:11px;color:{rank_color(run.index)}">'
        f"━ {run.letter} {say_last(run)}</span> "
    )


def _plot(chart: ComparedChart, *, is_first: bool) -> str:
    sheet = SvgSheet()
    draw_compared(sheet, chart)
    said = escape(chart.said())
    ticks = "".join(map(tick, sheet.labels))
    lines = {LETTERS[run.index]: run.line for run in chart.runs}
    shown = "".join(map(tip, tips_by_name(chart.frame, lines)))
    other = "" if is_first else "nbddp-over "
    image = image_of(sheet, said, said) if is_first else ""
    return (
        f'<div class="nbddp-plot {other}nbddp-at-{chart.over.value}">'
        f"{image}{sheet.inline(said)}{ticks}{shown}</div>"
    )
