"""The commands of ``nbddp``: each prints an answer as text or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbddp.errors import NbddpError, RequestError
from nbddp.extensions.runs import SCHEMA
from nbddp.extensions.runs.open_run import find
from nbddp.extensions.terminal import (
    InterruptCommand,
    KillCommand,
    LogsCommand,
    MetricsCommand,
    RunsCommand,
    ShowCommand,
    StatusCommand,
    StopCommand,
    WatchCommand,
    WhyCommand,
    answers,
)
from nbddp.extensions.terminal.answer_texts import (
    logs_text,
    metrics_text,
    status_text,
    to_line,
    why_text,
)
from nbddp.ui.ansi import strip

if TYPE_CHECKING:
    from nbddp.ui.report.blocks import Report

LINES_OF_ONE, LINES_OF_EACH = 50, 10  # of a log, unless the user says how many

Json = dict[str, Any]


class Terminal:
    """The commands, by the names of its methods."""

    def status(self, args: StatusCommand) -> None:
        """Print what the group and every rank are doing."""
        _print(lambda: answers.status(find(args.run)), status_text, is_json=args.json)

    def why(self, args: WhyCommand) -> None:
        """Print the reason for the state of a run."""
        _print(lambda: answers.why(find(args.run)), why_text, is_json=args.json)

    def logs(self, args: LogsCommand) -> None:
        """Print the last lines of a rank, or of all ranks."""
        lines = args.lines or (LINES_OF_EACH if args.rank is None else LINES_OF_ONE)
        _print(lambda: answers.logs(find(args.run), args.rank, lines), logs_text, is_json=args.json)

    def metrics(self, args: MetricsCommand) -> None:
        """Print the newest values of the metrics."""
        answer = lambda: answers.metrics(find(args.run), args.metrics)  # noqa: E731
        _print(answer, metrics_text, is_json=args.json)

    def watch(self, args: WatchCommand) -> None:
        """Print the state of a run again every second, until the run ends."""
        from nbddp.extensions.terminal.watch import watch

        watch(find(args.run), is_json=args.json)

    def runs(self, args: RunsCommand) -> None:
        """Print the runs of this folder, or the user's live runs."""
        if args.live:
            from nbddp.extensions.runs.live_runs import live, live_text

            _print(live, live_text, is_json=args.json)
        elif args.json:
            _print(lambda: answers.runs(Path.cwd(), args.words, args.number), is_json=True)
        else:
            from nbddp.extensions.runs.run_list import list_runs
            from nbddp.extensions.runs.run_list_view import run_list_report

            _show(run_list_report(list_runs(Path.cwd(), args.words), most=args.number))

    def show(self, args: ShowCommand) -> None:
        """Print a run from its folder."""
        if args.json:
            _print(lambda: answers.show(find(args.run)), is_json=True)
            return
        from nbddp.extensions.runs.stored_run import StoredRun
        from nbddp.extensions.runs.stored_run_view import run_report
        from nbddp.extensions.runs.summary import describe_run_end

        run = StoredRun(find(args.run))
        _show(run_report(run, ending=describe_run_end(run, current=None)))

    def interrupt(self, args: InterruptCommand) -> None:
        """Interrupt the cell of a run."""
        _act(args, {"act": "interrupt"}, "interrupt the cell")

    def stop(self, args: StopCommand) -> None:
        """End the ranks of a run."""
        _act(args, answers.STOP, "end all ranks and lose their variables")

    def kill(self, args: KillCommand) -> None:
        """Kill a rank of a run."""
        _act(args, {"act": "kill", "rank": args.rank}, f"kill rank {args.rank}")


def _act(args: InterruptCommand | StopCommand | KillCommand, request: Json, what: str) -> None:
    """Ask the user, unless they said yes already, and then the kernel."""

    def answer() -> Json:
        path = find(args.run)
        if not (args.yes or _agrees(f"{what} of run {path.name} in {path}?")):
            raise RequestError("nothing was done")
        return answers.act(path, request)

    _print(answer, lambda found: f"{found['run']}: {found['done']}", is_json=args.json)


def _agrees(question: str) -> bool:
    if not sys.stdin.isatty():
        raise RequestError(
            "nothing was done: this command asks before it acts, and has no terminal; add --yes"
        )
    sys.stderr.write(f"{question} [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _show(report: Report) -> None:
    from nbddp.ui.report.render import render_text

    _write(render_text(report))


def _print(answer: Callable[[], Json], text: Callable[[Json], str] = str, *, is_json: bool) -> None:
    """Print an answer. As JSON, an error is an answer, too, and the exit code is still 1."""
    try:
        found = answer()
    except NbddpError as error:
        if is_json:
            _write(to_line({"schema": SCHEMA, "error": str(error)}))
        raise
    _write(to_line(found) if is_json else text(found))


def _write(text: str) -> None:
    """Print a text without control sequences: ranks and users have written parts of it."""
    sys.stdout.write(strip(text) + "\n")
