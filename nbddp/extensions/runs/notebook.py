"""``%ddp runs``, ``%ddp show`` and ``%ddp compare``: runs on disk."""

from __future__ import annotations

from pathlib import Path

from nbddp.charts.axes import AxisScale
from nbddp.errors import RequestError, as_request_error
from nbddp.extensions.runs import CompareArguments, RunsArguments, ShowArguments, XAxis
from nbddp.extensions.runs.comparison import compare, metric_filter, no_such_metric
from nbddp.extensions.runs.comparison_view import comparison_report
from nbddp.extensions.runs.find import find_run, unique_folders
from nbddp.extensions.runs.live_runs import live, live_text
from nbddp.extensions.runs.run_list import list_runs, remove, write_note
from nbddp.extensions.runs.run_list_view import run_list_report
from nbddp.extensions.runs.stored_run import StoredRun
from nbddp.extensions.runs.stored_run_view import run_report
from nbddp.extensions.runs.summary import describe_run_end, read_note
from nbddp.formatting import plural
from nbddp.group.notebook_half import NotebookHalf
from nbddp.sigint import import_interruptibly


class StoredRuns(NotebookHalf):
    """The commands for runs on disk."""

    def show(self, args: ShowArguments) -> None:
        """Show a run, or one of its cells.

        Raises:
            RequestError: the run, the cell or the metric does not exist.
        """
        current = self.notebook.current_run
        wanted = metric_filter(args.metrics) if args.metrics else None
        run = StoredRun(find_run(args.run, Path.cwd(), current=self.notebook.last_run), wanted)
        cell = None if args.cell is None else run.cell(args.cell)
        metrics = run.metrics(cell).names() if args.metrics else None
        if metrics == []:
            recorded = StoredRun(run.path).metrics(cell)
            what = "run" if cell is None else "cell"
            raise no_such_metric(
                args.metrics, recorded.names(), of=what, more=recorded.dropped_names
            )
        ending = describe_run_end(run, current=current)
        scale = AxisScale(args.scale)
        self.notebook.show(run_report(run, cell, ending=ending, metrics=metrics, scale=scale))

    def runs(self, args: RunsArguments) -> None:
        """List the runs. With ``rm`` or ``note`` as the first word, remove runs or write a note.

        Raises:
            RequestError: the run does not exist, or it cannot be removed or get a note.
        """
        word, *rest = args.run or [""]
        current, base = self.notebook.current_run, Path.cwd()
        if word == "rm":
            paths = unique_folders(_find_runs("rm", rest, current))
            for path in paths:
                remove(path, current=current)
            names = ", ".join(path.name for path in paths)
            self.notebook.print_line(f"nbddp: deleted {plural(len(paths), 'run')}: {names}")
        elif word == "note":
            [path] = _find_runs("note", rest[:1], current)
            note = _write_or_read_note(path, rest[1:], args) or "no note"
            self.notebook.print_line(f"nbddp: {path.name}: {note}")
        elif args.live:
            self.notebook.print_line(live_text(live()))
        else:
            listing = list_runs(base, args.run, sort=args.sort, is_down=args.down, current=current)
            self.notebook.show(run_list_report(listing, most=args.number))

    def compare(self, args: CompareArguments) -> None:
        """Compare runs, or save their charts.

        Raises:
            RequestError: a run or metric does not exist, or the file cannot be written.
        """
        current, base = self.notebook.current_run, Path.cwd()
        paths = unique_folders(find_run(name, base, current=current) for name in args.run)
        if len(paths) < 2 <= len(args.run):
            raise RequestError(f"these are all run {paths[0].name}: compare needs two or more runs")
        comparison = compare(paths, args.metrics, current=current)
        over, scale = XAxis(args.over), AxisScale(args.scale)
        if over not in comparison.axes:
            raise RequestError(
                "some runs have no number of samples per step: use --over step or time"
            )
        if args.save is None:
            report = comparison_report(comparison, over=over, scale=scale, is_smooth=args.smooth)
            self.notebook.show(report)
            return
        import_interruptibly("nbddp.charts.figure")  # loads matplotlib
        from nbddp.charts.figure import draw_charts
        from nbddp.extensions.runs.compared_chart import compared_charts

        charts = compared_charts(comparison, over, scale)
        figure = draw_charts(charts, names=comparison.legend, is_smooth=args.smooth)
        with as_request_error(f"{args.save} cannot be written"):
            figure.savefig(args.save)
        self.notebook.print_line(f"nbddp: {plural(len(charts), 'chart')} in {args.save}")


def _write_or_read_note(path: Path, words: list[str], args: RunsArguments) -> str:
    """Write a note if there is one; return the note of the run."""
    note = " ".join(words).strip()
    if words and bool(note) == args.off:
        raise RequestError("note needs a text, or --off to remove the note")
    if note or args.off:
        write_note(path, note)
    return read_note(path)


def _find_runs(act: str, names: list[str], current: Path | None) -> list[Path]:
    if not names:
        raise RequestError(f"which run? `%ddp runs {act} NAME`; `%ddp runs` lists them")
    base = Path.cwd()
    return [
        _folder_named(name, base) or find_run(name, base, current=current, is_unique=True)
        for name in names
    ]


def _folder_named(name: str, base: Path) -> Path | None:
    """Return the folder of exactly this name, even if it holds no readable run."""
    path = base / ".nbddp" / "runs" / name
    try:
        is_one = name == path.name and not name.startswith(".") and path.is_dir()
    except OSError:  # such a name is too long for a folder
        return None
    return path if is_one else None
