"""How a run ended, as far as its record and this machine know."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from nbddp.record.finished import RecordedRun

STOPPED = "stopped"
RUNNING = "still running"
KILLED = "its kernel ended before it could record the end"
UNKNOWN = "its end is not recorded: its kernel was killed, or still runs"


def say_ending(run: RecordedRun, *, current: Path | None) -> str:
    """How a run ended; ``current`` is the one of this kernel that goes on, if one does."""
    if run.was_stopped:
        return STOPPED
    if run.path == current:
        return RUNNING
    return say_unended(run.facts, began=run.events[0].at if run.events else 0.0)


def say_unended(facts: Mapping[str, Any], *, began: float) -> str:
    """Of a run without an end whether its kernel lives; ``began`` as ``time.time()``."""
    pid, host = facts.get("pid"), facts.get("host")
    if not isinstance(pid, int) or host != platform.node():
        return UNKNOWN
    return RUNNING if _is_kernel(pid, began) else KILLED


def _is_kernel(pid: int, began: float) -> bool:
    """Whether this process lives, and is there since before the run."""
    try:
        process = psutil.Process(pid)
        is_dead = process.status() == psutil.STATUS_ZOMBIE  # whoever started it has not looked yet
        return bool(not is_dead and process.create_time() <= began)
    except (psutil.Error, ValueError):
        return False
