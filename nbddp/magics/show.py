"""``%ddp show``: a run is opened from its folder and drawn again."""

from __future__ import annotations

import platform
from fnmatch import fnmatchcase
from pathlib import Path

import psutil

from nbddp.errors import RequestError
from nbddp.record.finished import RecordedCell, RecordedRun

STOPPED = "stopped"
RUNNING = "still running"
KILLED = "its kernel ended before it could record the end"
UNKNOWN = "its end is not recorded: its kernel was killed, or still runs"


def say_ending(run: RecordedRun, *, current: Path | None) -> str:
    """How a run ended, as far as its record and this machine know."""
    if run.was_stopped:
        return STOPPED
    if run.path == current:
        return RUNNING
    pid, host = run.facts.get("pid"), run.facts.get("host")
    if not isinstance(pid, int) or host != platform.node():
        return UNKNOWN
    return RUNNING if _is_kernel_of(run, pid) else KILLED


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


def _is_kernel_of(run: RecordedRun, pid: int) -> bool:
    """Whether this process is there since before the run."""
    try:
        return bool(psutil.Process(pid).create_time() <= _began(run))
    except psutil.NoSuchProcess:
        return False


def _began(run: RecordedRun) -> float:
    return run.events[0].at if run.events else 0.0
