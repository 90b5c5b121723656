"""The commands of ``nbddp``: each prints an answer as text or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbddp.errors import NbddpError
from nbddp.extensions.terminal import (
    SCHEMA,
    LogsCommand,
    MetricsCommand,
    RunsCommand,
    ShowCommand,
    StatusCommand,
    WatchCommand,
    WhyCommand,
    answers,
)
from nbddp.extensions.terminal.answer_texts import (
    live_text,
    logs_text,
    metrics_text,
    status_text,
    to_line,
    why_text,
)
from nbddp.extensions.terminal.open_run import find
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
            _print(answers.live, live_text, is_json=args.json)
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
