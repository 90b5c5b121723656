"""Find the descendants of a process, and end them.

When a process ends, Linux gives its children to the nearest ancestor that asked for them. Ranks
ask for them, and so does the forkserver that forks the ranks. A daemon that left its session and
its parent is therefore still found as a descendant of its rank.

Two kinds of processes are not ended, because they free the shared memory of processes that have
ended: multiprocessing's resource tracker, and torch's manager of shared memory (2 s later).
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

TERMINATE_TIMEOUT = 1.0  # seconds that a terminated process has to end
KILL_TIMEOUT = 2.0  # seconds that a killed process has to end: it may have to free much memory
_PR_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h
_FREES_MEMORY = ("from multiprocessing.resource_tracker import main", "torch_shm_manager")

Find = Callable[[], list[psutil.Process]]


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def find_children(pid: int) -> list[psutil.Process]:
    """Return the children of a process.

    Linux has a list of them for each thread. Elsewhere all processes, maybe thousands, are
    searched.
    """
    threads = list(Path(f"/proc/{pid}/task").glob("*/children"))
    found: list[psutil.Process] = []
    for thread in threads:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found += find_processes(map(int, thread.read_text().split()))
    if not threads:
        with suppress(psutil.Error):
            found = psutil.Process(pid).children()
    return found


def find_descendants(pid: int) -> list[psutil.Process]:
    """Return the children of a process, their children, and so on."""
    found = find_children(pid)
    for process in found:  # the list grows during the loop
        found += find_children(process.pid)
    return found


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP."""
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def is_alive(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def busy_time(pid: int) -> float:
    """Return the CPU seconds of a process, and those for which its main thread waited for a core.

    On a busy machine, a process that computes may get little of the CPU.

    Raises:
        psutil.Error: the process does not exist.
    """
    used = psutil.Process(pid).cpu_times()
    try:
        waited = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # macOS, or a Linux without statistics of its scheduler
        waited = 0.0
    return float(used.user + used.system) + waited


def find_processes(pids: Iterable[int]) -> list[psutil.Process]:
    """Return a handle for each existing process; a later process with its id does not match it."""
    found = []
    for pid in pids:
        with suppress(psutil.Error):
            found.append(psutil.Process(pid))
    return found


def terminate_all(find: Find) -> None:
    """Terminate the processes that ``find`` returns, then kill those that are left."""
    processes = _to_kill(find())
    _signal(processes, signal.SIGTERM)
    _wait_for(processes, TERMINATE_TIMEOUT)
    kill_all(find)


def kill_all(find: Find) -> None:
    """Kill the processes that ``find`` returns, until it finds none: one may start another."""
    deadline = time.monotonic() + KILL_TIMEOUT
    while (remaining := _to_kill(find())) and time.monotonic() < deadline:
        _signal(remaining, signal.SIGKILL)
        _wait_for(remaining, deadline - time.monotonic())


def _signal(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.Error):  # it has ended
            process.send_signal(number)


def _to_kill(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the living processes, without those that free the shared memory of others."""
    found = []
    for process in _living(processes):
        with suppress(psutil.Error):  # it has ended
            command = " ".join(process.cmdline())
            if not any(each in command for each in _FREES_MEMORY):
                found.append(process)
    return found


def _living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _wait_for(processes: Iterable[psutil.Process], timeout: float) -> None:
    """Wait until no process is alive. psutil's own wait also waits for zombies of other parents."""
    deadline, pause = time.monotonic() + timeout, 0.001
    while (processes := _living(processes)) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
