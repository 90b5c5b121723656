"""``%ddp show``: a run drawn again from its folder."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from nbddp.archive.comparison import metric_filter, no_such_metric
from nbddp.archive.ending import say_ending
from nbddp.archive.find import find_run
from nbddp.charts.axes import AxisScale
from nbddp.magics.desk import Desk
from nbddp.record.finished import RecordedRun
from nbddp.ui.report.stored_run import run_report


def show_run(desk: Desk, args: Namespace) -> None:
    """Show a run, or one of its cells.

    Raises:
        RequestError: there is none, or no such cell or metric.
    """
    current = desk.current_run
    wanted = metric_filter(args.metrics) if args.metrics else None
    run = RecordedRun(find_run(args.run, Path.cwd(), current=desk.last_run), wanted)
    cell = None if args.cell is None else run.cell(args.cell)
    metrics = run.metrics(cell).names() if args.metrics else None
    if metrics == []:
        known = RecordedRun(run.path).metrics(cell)
        what = "run" if cell is None else "cell"
        raise no_such_metric(args.metrics, known.names(), of=what, more=known.dropped_names)
    ending = say_ending(run, current=current)
    scale = AxisScale(args.scale)
    desk.views.show(run_report(run, cell, ending=ending, metrics=metrics, scale=scale))
