"""``%ddp compare``: compare runs on the page, as text, or in a file."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from nbddp.archive.comparison import XAxis, compare
from nbddp.archive.find import apart, find_run
from nbddp.charts.axes import AxisScale
from nbddp.errors import RequestError
from nbddp.formatting import plural
from nbddp.imports import import_aside
from nbddp.magics.desk import Desk
from nbddp.ui.report.comparison import comparison_report


def compare_runs(desk: Desk, args: Namespace) -> None:
    """Compare runs, or save their charts.

    Raises:
        RequestError: there is no such run or metric, or the file cannot be written.
    """
    current, base = desk.current_run, Path.cwd()
    paths = apart(find_run(name, base, current=current) for name in args.run)
    if len(paths) < 2 <= len(args.run):
        raise RequestError(f"these are the same run, {paths[0].name}: compare needs two or more")
    comparison = compare(paths, args.metrics, current=current)
    over, scale = XAxis(args.over), AxisScale(args.scale)
    if over not in comparison.axes:
        raise RequestError("how many samples a step has is not known of all: --over step, or time")
    if args.save is None:
        report = comparison_report(comparison, over=over, scale=scale, is_smooth=args.smooth)
        desk.views.show(report)
        return
    import_aside("nbddp.charts.figure")  # loads matplotlib
    from nbddp.archive.compared_chart import compared_charts
    from nbddp.charts.figure import draw_charts

    charts = compared_charts(comparison, over, scale)
    figure = draw_charts(charts, names=comparison.names, is_smooth=args.smooth)
    try:
        figure.savefig(args.save)
    except OSError as error:
        raise RequestError(f"{args.save} cannot be written: {error.strerror}") from None
    desk.views.say(f"nbddp: {plural(len(charts), 'chart')} in {args.save}")
