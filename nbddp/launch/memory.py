"""The memory limit, and whether the system killed a rank because it ran out of memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

COUNTERS = (  # files with a line "oom_kill N": of the machine and of a container (v2, v1)
    Path("/proc/vmstat"),
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
)
LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
MEMORY_LIMIT_VARIABLE = "MEM_LIMIT"  # environment variable of JupyterHub and Binder: bytes
HIGH_SHARE = 0.6  # of the memory limit
_WAY_OUT = "a smaller batch, fewer ranks or fewer DataLoader workers need less"


class MemoryWatch:
    """Counts the processes that the system has killed for lack of memory since this was created."""

    def __init__(
        self, counters: Sequence[Path] = COUNTERS, limits: Sequence[Path] = LIMITS
    ) -> None:
        self._counters = counters
        self._limits = limits
        self._before = self._count()

    def hint(self, used: int) -> str:
        """Return a hint if a SIGKILL from outside probably came because of memory; else "".

        Args:
            used: bytes that all ranks together used in the last sample.
        """
        now = self._count()
        has_killed = any(now[path] > self._before.get(path, 0) for path in now)
        self._before = now
        if has_killed:
            return f"the system ran out of memory and killed it; {_WAY_OUT}"
        limit = memory_limit(self._limits)
        if used < HIGH_SHARE * limit:
            return ""
        share = f"{used / 2**30:.1f} of {limit / 2**30:.1f} GiB"
        return f"probably out of memory: the ranks used {share} in the last sample; {_WAY_OUT}"

    def _count(self) -> Mapping[Path, int]:
        counts = {}
        for path in self._counters:
            for line in _read(path).splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill" and number.isdecimal():
                    counts[path] = int(number)
        return counts


def memory_limit(limits: Sequence[Path] = LIMITS) -> int:
    """Return the memory limit in bytes: of JupyterHub, of the container, or of the machine."""
    candidates = [
        os.environ.get(MEMORY_LIMIT_VARIABLE, ""),
        *(_read(path).strip() for path in limits),
    ]
    return min([*map(int, filter(str.isdecimal, candidates)), int(psutil.virtual_memory().total)])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another operating system, or no permission
        return ""
