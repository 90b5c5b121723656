"""The publishing process: it publishes a run and reports to the notebook in lines of JSON.

A tracker that fails or does not answer ends only this process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from nbddp.extensions.publish import TRACKER_CLASSES
from nbddp.extensions.publish.publisher import Publisher, write_published
from nbddp.extensions.publish.tracker import PublishError, Tracker, parse_target

POLL_INTERVAL = 0.5  # seconds between two reads of new data
EXIT_TIMEOUT = 5.0  # seconds that the threads of a tracker have to end
ANSWER_TIMEOUT = 300.0  # seconds for an answer of the tracker; its last call may upload
NICENESS = 10  # the ranks have priority


class ReportSender:
    """Sends reports to the notebook through the original standard output.

    The standard output itself is redirected to the log.
    """

    def __init__(self) -> None:
        self._fd = os.dup(1)
        os.dup2(2, 1)

    def send(self, **facts: Any) -> None:
        """Send a report as a line of JSON; ignore errors, because the notebook may have ended."""
        with suppress(OSError):  # one write: the threads' reports do not mix
            os.write(self._fd, f"{json.dumps(facts)}\n".encode())


@contextmanager
def time_limit(operation: str, kind: str, seconds: float, reports: ReportSender) -> Iterator[None]:
    """End this process if the tracker does not answer in time: the tracker's state is unknown."""

    def exit_process() -> None:
        reports.send(failed=f"{kind} did not answer for {seconds:g} s ({operation})")
        os._exit(1)

    timer = _start_timer(seconds, exit_process)
    try:
        yield
    finally:
        timer.cancel()


def _start_timer(seconds: float, act: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    return timer


def main() -> int:
    """Publish a run, and report to the notebook in lines of JSON.

    A report is a ``notice`` for the user, or the last one: the reason why publishing ``failed``, or
    the result.
    """
    parser = argparse.ArgumentParser(prog="nbddp.extensions.publish")
    parser.add_argument("target", type=parse_target)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--live", type=int, default=0, metavar="PID", help="of the notebook")
    parser.add_argument("--patience", type=float, default=ANSWER_TIMEOUT)
    args = parser.parse_args()
    reports = ReportSender()
    try:
        _publish(args, reports)
    except Exception as error:  # noqa: BLE001 - the notebook shows any error
        kind = "" if isinstance(error, PublishError) else f"{type(error).__name__}: "
        reports.send(failed=f"{kind}{error}".strip().partition("\n")[0])
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    finally:
        _start_timer(EXIT_TIMEOUT, partial(os._exit, 1))
    return 0


def _publish(args: argparse.Namespace, reports: ReportSender) -> None:
    if args.live:
        os.nice(NICENESS)
    kind = args.target.kind
    limit = partial(time_limit, kind=kind, seconds=args.patience, reports=reports)
    with limit("load"):
        try:
            module = importlib.import_module(f"nbddp.extensions.publish.to_{kind}")
            tracker: Tracker = getattr(module, TRACKER_CLASSES[kind])()
        except Exception as error:
            raise PublishError(f"the package {kind} cannot be loaded: {error}") from error
    write_note = partial(write_published, args.folder, kind, name=args.name)

    def report_start(where: str) -> None:
        if args.live:
            write_note(where=where)
            reports.send(notice=f"published to {kind}: {where}")

    publisher = Publisher(
        args.folder,
        tracker,
        name=args.name,
        project=args.target.used_project,
        limit=limit,
        is_live=bool(args.live),
        report_start=report_start,
    )
    if kind == "trackio":  # it raises no error if it loses a step
        warnings.showwarning = partial(_report_warning, reports, warnings.showwarning)
    is_over = not args.live
    while not is_over and os.getppid() == args.live:
        had_stopped = publisher.has_stopped
        publisher.publish_new()
        is_over = had_stopped and publisher.has_stopped  # a restart would have begun
        time.sleep(POLL_INTERVAL)
    outcome = publisher.finish()
    late = publisher.aggregator.late
    result: dict[str, Any] = {"where": publisher.where, "steps": publisher.steps, "late": late}
    write_note(is_whole=not outcome.is_live, **result)
    reports.send(**result)


def _report_warning(
    reports: ReportSender, show: Callable[..., None], message: Warning | str, *more: Any
) -> None:
    """Report trackio's first warning, and log it; ``show`` also logs the later ones."""
    warnings.showwarning = show
    reports.send(notice=f"trackio: {' '.join(str(message).split())}")
    show(message, *more)
