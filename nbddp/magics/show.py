"""``%ddp show``: a run drawn again from its folder."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from nbddp.archive.comparing import chosen_metrics
from nbddp.archive.ending import say_ending
from nbddp.magics.desk import Desk
from nbddp.record.finished import RecordedRun
from nbddp.record.runs import run_asked_for


def show_run(desk: Desk, args: Namespace) -> None:
    """Show a run, or one of its cells.

    Raises:
        RequestError: there is none, or no such cell or metric.
    """
    current = desk.current_run
    run = RecordedRun(run_asked_for(args.run, Path.cwd(), current=current))
    cell = None if args.cell is None else run.cell(args.cell)
    known = run.metrics(cell).names() if args.metrics else []
    metrics = args.metrics and chosen_metrics(known, args.metrics, of="run")
    ending = say_ending(run, current=current)
    desk.views.show_run(run, cell, ending=ending, metrics=metrics or None)
