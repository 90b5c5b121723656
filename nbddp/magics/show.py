"""``%ddp show``: a run is opened from its folder and drawn again."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil

from nbddp.record.finished import RecordedRun

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


def _is_kernel_of(run: RecordedRun, pid: int) -> bool:
    """Whether this process is there since before the run."""
    try:
        return bool(psutil.Process(pid).create_time() <= _began(run))
    except psutil.NoSuchProcess:
        return False


def _began(run: RecordedRun) -> float:
    return run.events[0].at if run.events else 0.0
