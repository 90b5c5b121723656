"""Processes that descend from another one: found wherever they went, and ended by their handles.

A process whose parent ends is handed to another one, on Linux to the nearest ancestor that asked
for it. Ranks do, and so does the helper that they are forked from: so a daemon that has left its
session and its parent is still known to be a rank's.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

TERMINATE_TIMEOUT = 1.0  # seconds to end when asked to
KILL_TIMEOUT = 2.0  # seconds to be gone when killed: a lot of memory may have to be given back
_PR_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h

Find = Callable[[], list[psutil.Process]]


def adopt_orphans() -> None:
    """From here on a descendant whose parent ends becomes a child of this process (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def find_children(pid: int) -> list[psutil.Process]:
    """The children of a process.

    Linux keeps a list of them, by thread; elsewhere all processes, maybe thousands, are looked at.
    """
    threads = list(Path(f"/proc/{pid}/task").glob("*/children"))
    found: list[psutil.Process] = []
    for thread in threads:
        with suppress(OSError):  # it has just ended
            found += find_processes(map(int, thread.read_text().split()))
    if not threads:
        with suppress(psutil.Error):
            found = psutil.Process(pid).children()
    return found


def find_descendants(pid: int) -> list[psutil.Process]:
    """The children of a process, and theirs."""
    found = find_children(pid)
    for process in found:  # it grows meanwhile
        found += find_children(process.pid)
    return found


def cpu_time(pid: int) -> float:
    """Return the CPU seconds that a process has used.

    Raises:
        psutil.Error: there is no such process.
    """
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


def find_processes(pids: Iterable[int]) -> list[psutil.Process]:
    """A handle, which is for no later process of the same number, of each that is there."""
    found = []
    for pid in pids:
        with suppress(psutil.Error):
            found.append(psutil.Process(pid))
    return found


def terminate_all(find: Find) -> None:
    """Ask those that are found to end, and kill those that do not."""
    processes = find()
    _signal(processes, signal.SIGTERM)
    _wait_for(processes, TERMINATE_TIMEOUT)
    kill_all(find)


def kill_all(find: Find) -> None:
    """Kill those that are found until none is: one may start another meanwhile."""
    deadline = time.monotonic() + KILL_TIMEOUT
    while (remaining := _living(find())) and time.monotonic() < deadline:
        _signal(remaining, signal.SIGKILL)
        _wait_for(remaining, deadline - time.monotonic())


def _signal(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.Error):  # it has just ended
            process.send_signal(number)


def _living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _wait_for(processes: Iterable[psutil.Process], timeout: float) -> None:
    """Wait until none of them lives; psutil's own would wait for zombies of other parents too."""
    deadline, pause = time.monotonic() + timeout, 0.001
    while (processes := _living(processes)) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
