"""``%ddp compare``: runs beside each other, on the page, as text, or in a file."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from nbddp.archive.comparing import Comparison, Over, compare
from nbddp.archive.find import apart, find_run
from nbddp.charts.axes import AxisScale
from nbddp.errors import RequestError
from nbddp.formatting import plural
from nbddp.imports import import_aside
from nbddp.magics.desk import Desk


def compare_runs(desk: Desk, args: Namespace) -> None:
    """Show runs beside each other, or save their charts.

    Raises:
        RequestError: there is no such run or metric, or the file cannot be written.
    """
    current, base = desk.current_run, Path.cwd()
    paths = apart(find_run(name, base, current=current) for name in args.run)
    if len(paths) < 2 <= len(args.run):
        raise RequestError(f"these are the same run, {paths[0].name}: compare needs two or more")
    comparison = compare(paths, args.metrics, current=current)
    how = {"over": Over(args.over), "scale": args.scale, "is_smooth": args.smooth}
    if Over(args.over) not in comparison.axes:
        raise RequestError("how many samples a step has is not known of all: --over step, or time")
    if args.save is None:
        desk.views.show_comparison(comparison, **how)
        return
    _save(comparison, args.save, how)
    desk.views.say(f"nbddp: {plural(len(comparison.drawn), 'chart')} in {args.save}")


def _save(comparison: Comparison, path: Path, how: dict[str, Any]) -> None:
    import_aside("nbddp.charts.figure")  # loads matplotlib
    from nbddp.archive.compared_chart import compared_charts
    from nbddp.charts.figure import draw_charts

    charts = compared_charts(comparison, how["over"], AxisScale(how["scale"]))
    figure = draw_charts(charts, names=comparison.names, is_smooth=how["is_smooth"])
    try:
        figure.savefig(path)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}") from None
