"""``%ddp show``: a run drawn again from its folder."""

from __future__ import annotations

from argparse import Namespace
from fnmatch import fnmatchcase
from pathlib import Path

from nbddp.archive.ending import say_ending
from nbddp.errors import RequestError
from nbddp.magics.desk import Desk
from nbddp.record.finished import RecordedCell, RecordedRun
from nbddp.record.runs import run_asked_for


def show_run(desk: Desk, args: Namespace) -> None:
    """Show a run, or one of its cells.

    Raises:
        RequestError: there is none, or no such cell or metric.
    """
    current = desk.current_run
    run = RecordedRun(run_asked_for(args.run, Path.cwd(), current=current))
    cell = None if args.cell is None else run.cell(args.cell)
    metrics = args.metrics and chosen_metrics(run, cell, args.metrics)
    ending = say_ending(run, current=current)
    desk.views.show_run(run, cell, ending=ending, metrics=metrics or None)


def chosen_metrics(run: RecordedRun, cell: RecordedCell | None, patterns: str) -> list[str]:
    """The metrics whose name, or whose name's pattern, is between the commas.

    Raises:
        RequestError: there is none.
    """
    names = run.metrics(cell).names()
    wanted = [each.strip() for each in patterns.split(",")]
    chosen = [name for name in names if any(fnmatchcase(name, each) for each in wanted)]
    if not chosen:
        there = ", ".join(names) or "none"
        raise RequestError(f"there is no metric {patterns}; the metrics of the run are: {there}")
    return chosen
