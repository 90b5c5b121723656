"""`%ddp show`: a stored run, or one of its cells."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

from nbddp.charts.axes import AxisScale
from nbddp.extensions.runs.stored_run import StoredCell, StoredRun
from nbddp.formatting import cut_text, format_ranks, format_seconds, plural
from nbddp.record.metrics import MetricStore
from nbddp.ui.html_pieces import MAX_CHARTS, escape
from nbddp.ui.log_lines import LogLine, log_html
from nbddp.ui.report.blocks import (
    Block,
    Card,
    Cell,
    Code,
    Details,
    Dot,
    Markup,
    Report,
    Table,
    note,
)
from nbddp.ui.report.rank_table import rank_blocks
from nbddp.ui.report.status import charts_block, events_block
from nbddp.ui.wording import describe_group, note_hidden_metrics, relative_path

SHOWN_CELLS = 20  # the newest cells
SHOWN_REPORTS = 3  # the newest failures
SHOWN_METRICS = 20  # in a text, unless the user chooses metrics
TAIL, TEXT_TAIL = 50, 10  # lines of each rank, on a page and in a text
OPEN_TAILS = 4  # with more ranks, the lines are folded
MAX_TAILS = 64  # ranks with log lines in the report
UNREADABLE = "of the record not readable: a full disk or a killed process cut them off"


def run_report(
    run: StoredRun,
    cell: StoredCell | None = None,
    *,
    ending: str = "",
    metrics: Collection[str] | None = None,
    scale: AxisScale = AxisScale.AUTO,
) -> Report:
    """Report a run, or one of its cells.

    Args:
        run: the run.
        cell: the cell to report; None for the whole run.
        ending: a text that says how the run ended.
        metrics: the metrics to show; None for the first ones.
        scale: the scale of the value axis in charts.
    """
    curves = run.metrics(cell)
    drawn = curves.snapshot(most=MAX_CHARTS, chosen=metrics)
    numbers = charts_block(drawn, scale, "\n".join(_numbers(curves, metrics)))
    among = run.cells if cell is None else (cell,)
    failed = [each for each in among if each.is_over and each.outcome != "ok"]
    snapshot = run.snapshot(cell)
    if cell is None:
        facts = [plural(len(run.cells), "cell"), *describe_group(snapshot)]
        facts += [format_seconds(snapshot.seconds), ending]
        text = " · ".join([f"run {run.name}", *filter(None, facts)])
        title = Cell(text, dot=Dot.OFF if run.was_stopped else Dot.WARN)
        parts: list[Block] = _cells(run)
    else:
        text = " · ".join([f"cell {cell.number} of run {run.name}", *_cell_facts(cell)])
        title = Cell(text, dot=_dot(cell))
        parts = rank_blocks(snapshot.ranks)
    return Report(
        title,
        [
            *(_failure(each, is_named=cell is None) for each in failed[-SHOWN_REPORTS:]),
            *parts,
            events_block(snapshot),
            numbers,
            *_tails(run, cell),
            *([Details("its source", [Code(cell.source)])] if cell else []),
            note(f"{plural(run.unreadable, 'line')} {UNREADABLE}" if run.unreadable else ""),
            note(f"all files of the run are in {relative_path(str(run.path))}"),
        ],
    )


# ---- cells


def _cells(run: StoredRun) -> list[Block]:
    shown = run.cells[-SHOWN_CELLS:]
    rows: list[list[str | Cell]] = [
        [str(cell.number), Cell(" · ".join(_cell_facts(cell)), dot=_dot(cell)), _source(cell)]
        for cell in shown
    ]
    earlier = len(run.cells) - len(shown)
    more = note(f"{earlier} earlier cells" if earlier else "")
    return [more, Table(["cell", "outcome", ""], rows, "cells")]


def _cell_facts(cell: StoredCell) -> list[str]:
    took = "" if cell.seconds is None else format_seconds(cell.seconds)
    return [*filter(None, [_outcome(cell), format_ranks(cell.ranks), took])]


def _outcome(cell: StoredCell) -> str:
    if not cell.is_over:
        return "its end is not recorded"
    outcome = "done" if cell.outcome == "ok" else cell.outcome
    return f"{outcome} (run again)" if cell.is_again else outcome


def _dot(cell: StoredCell) -> Dot:
    if not cell.is_over or cell.is_interrupted:
        return Dot.WARN
    return Dot.OK if cell.outcome == "ok" else Dot.BAD


def _failure(cell: StoredCell, *, is_named: bool) -> Card:
    name = f"cell {cell.number}: " if is_named else ""
    return Card(name + (cell.report or cell.outcome), is_error=not cell.is_interrupted)


def _source(cell: StoredCell) -> Cell:
    """Return the first line of code that is not empty and not a comment."""
    lines = [line for line in map(str.strip, cell.source.splitlines()) if line]
    first = cut_text(next((line for line in lines if not line.startswith("#")), ""), 80)
    return Cell(first, html=f"<code>{escape(first)}</code>")


# ---- metrics and logs


def _numbers(store: MetricStore, metrics: Collection[str] | None) -> Iterator[str]:
    names = store.names()
    shown = names[:SHOWN_METRICS] if metrics is None else [n for n in names if n in metrics]
    for name in shown:
        last = store.last(name)
        values = ", ".join(f"{value:.6g}" for value in last.values())
        yield f"{name}: {values} at last ({format_ranks(list(last))})"
    others = [name for name in names if name not in shown]
    yield from note_hidden_metrics(others, len(others) + store.dropped_names)


def _tails(run: StoredRun, cell: StoredCell | None) -> Iterator[Details]:
    ranks: Sequence[int] = run.ranks if cell is None else cell.ranks
    for rank in ranks[:MAX_TAILS]:
        if text := run.tail(rank, TAIL, cell):
            last = "\n".join(text.splitlines()[-TEXT_TAIL:])
            log = Markup(partial(log_html, [LogLine((rank,), text)]), last)
            yield Details(f"rank {rank}", [log], is_open=len(ranks) <= OPEN_TAILS)
