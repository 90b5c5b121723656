"""A run that was opened from its folder, or one of its cells, in the looks of a cell's record."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from nbddp.formatting import plural
from nbddp.record.finished import RecordedCell, RecordedRun
from nbddp.ui.ansi import to_html
from nbddp.ui.panel.bare import STRONG, dot
from nbddp.ui.panel.charthtml import charts_html
from nbddp.ui.panel.charts import Charts
from nbddp.ui.panel.html import card, escape, rank_table, time_line
from nbddp.ui.panel.loghtml import log_html
from nbddp.ui.panel.style import SHEET
from nbddp.ui.tails import Line
from nbddp.ui.text.run import (
    SHOWN_CELLS,
    cell_facts,
    cell_title,
    failed_cells,
    first_line,
    run_title,
)
from nbddp.ui.words import shorten

TAIL = 50  # lines of each rank
OPEN_TAILS = 4  # of so many ranks they are shown at once
MAX_TAILS = 64  # ranks whose lines are shown


def run_html(
    run: RecordedRun,
    cell: RecordedCell | None = None,
    *,
    ending: str = "",
    metrics: Collection[str] | None = None,
) -> str:
    """The run, or a cell of it; ``ending`` says how the run ended.

    ``metrics`` are those that have a chart; None for the first few.
    """
    charts = Charts(run.metrics(cell).snapshot, lambda _chart: None, chosen=metrics)
    pictures = charts.finish()
    notes = [charts.note(), _unreadable(run), f"all of it is in {shorten(str(run.path))}"]
    parts = [
        SHEET,
        '<div class="nbddp">',
        f"<details open><summary>{_title(run, cell, ending)}</summary>",
        *(_report(each, is_named=cell is None) for each in failed_cells(run, cell)),
        _cells(run) if cell is None else rank_table(run.snapshot(cell).ranks),
        time_line(run.snapshot(cell)),
        "</details>",
        charts_html(pictures),
        *_tails(run, cell),
        _source(cell) if cell is not None else "",
        *(f'<div class="nbddp-muted">{escape(note)}</div>' for note in notes if note),
        "</div>",
    ]
    return "".join(parts)


def _title(run: RecordedRun, cell: RecordedCell | None, ending: str) -> str:
    whole = run_title(run, ending) if cell is None else cell_title(run, cell)
    first, _, rest = whole.partition(" · ")
    kind = _kind(cell) if cell is not None else _kind_of_run(run)
    return (
        f'{dot(kind)}<span class="nbddp-state" style="{STRONG}">{escape(first)}</span> '
        f'<span class="nbddp-muted">· {escape(rest)}</span>'
    )


def _kind_of_run(run: RecordedRun) -> str:
    return "nbddp-off" if run.was_stopped else "nbddp-warn"


def _kind(cell: RecordedCell) -> str:
    if not cell.is_over or cell.is_interrupted:
        return "nbddp-warn"
    return "nbddp-ok" if cell.outcome == "ok" else "nbddp-bad"


def _report(cell: RecordedCell, *, is_named: bool) -> str:
    name = f"cell {cell.number}: " if is_named else ""
    said = escape(name) + to_html(cell.report or cell.outcome)
    return card(said, is_error=not cell.is_interrupted)


def _cells(run: RecordedRun) -> str:
    rows = "".join(map(_row, run.cells[-SHOWN_CELLS:]))
    earlier = max(0, len(run.cells) - SHOWN_CELLS)
    more = f'<div class="nbddp-muted">{earlier} earlier cells</div>' if earlier else ""
    head = "<th>cell</th><th>outcome</th><th></th>"
    return (
        f'{more}<table class="nbddp-ranks nbddp-roomy"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _row(cell: RecordedCell) -> str:
    said = escape(" · ".join(cell_facts(cell)))
    source = f"<code>{escape(first_line(cell.source))}</code>"
    return f"<tr><td>{cell.number}</td><td>{dot(_kind(cell))}{said}</td><td>{source}</td></tr>"


def _tails(run: RecordedRun, cell: RecordedCell | None) -> Iterator[str]:
    ranks = run.ranks if cell is None else cell.ranks
    is_open = len(ranks) <= OPEN_TAILS
    for rank in ranks[:MAX_TAILS]:
        text = run.tail(rank, TAIL, cell)
        if text:
            log = log_html([Line((rank,), text)])
            opening = f"<details{' open' if is_open else ''}><summary>rank {rank}</summary>"
            yield f"{opening}{log}</details>"


def _source(cell: RecordedCell) -> str:
    text = f'<div class="jp-RenderedText"><pre>{escape(cell.source)}</pre></div>'
    return f"<details><summary>its source</summary>{text}</details>"


def _unreadable(run: RecordedRun) -> str:
    if not run.unreadable:
        return ""
    lines = plural(run.unreadable, "line")
    return f"{lines} of the record could not be read: a full disk or a killed process tore them"
