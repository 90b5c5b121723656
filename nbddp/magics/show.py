"""``%ddp show``: a run drawn again from its folder."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from nbddp.archive.comparing import Pattern, chosen_metrics
from nbddp.archive.ending import say_ending
from nbddp.archive.find import find_run
from nbddp.magics.desk import Desk
from nbddp.record.finished import RecordedCell, RecordedRun
from nbddp.ui.report.stored_run import run_report


def show_run(desk: Desk, args: Namespace) -> None:
    """Show a run, or one of its cells.

    Raises:
        RequestError: there is none, or no such cell or metric.
    """
    current = desk.current_run
    run = RecordedRun(find_run(args.run, Path.cwd(), current=desk.last_run))
    cell = None if args.cell is None else run.cell(args.cell)
    metrics = _chosen(run, cell, args.metrics) if args.metrics else None
    ending = say_ending(run, current=current)
    desk.views.show(run_report(run, cell, ending=ending, metrics=metrics))


def _chosen(run: RecordedRun, cell: RecordedCell | None, patterns: str) -> list[str]:
    """The metrics that were asked for, of all that the run has on disk."""
    run.want(Pattern(patterns).fits)
    curves = run.metrics(cell)
    return chosen_metrics(
        curves.names(),
        patterns,
        of="run" if cell is None else "cell",
        more=curves.dropped_names,
        is_at_least=curves.drops_more,
    )
