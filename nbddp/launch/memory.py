"""How much memory there is, and whether a rank was killed for want of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

COUNTERS = (  # each has a line "oom_kill N": the machine's, a container's (v2, v1)
    Path("/proc/vmstat"),
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
)
LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
MEMORY_LIMIT_VARIABLE = "MEM_LIMIT"  # JupyterHub's environment variable, so Binder's: bytes
HIGH_SHARE = 0.6  # of the memory there is
_WAY_OUT = "a smaller batch, fewer ranks or fewer DataLoader workers need less"


class MemoryWatch:
    """Counts the processes that the system has killed for want of memory since it was made."""

    def __init__(
        self, counters: Sequence[Path] = COUNTERS, limits: Sequence[Path] = LIMITS
    ) -> None:
        self._counters = counters
        self._limits = limits
        self._before = self._count()

    def hint_for_exit(self, exitcode: int | None, used: int) -> str:
        """Why a rank may have ended: a SIGKILL that nobody here sent is often for memory."""
        return self.hint(used) if exitcode == -signal.SIGKILL else ""

    def hint(self, used: int) -> str:
        """What to say of a rank that got a SIGKILL from nobody here; empty if memory fits not.

        Args:
            used: bytes that all ranks together used when they were last seen.
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
        return f"probably out of memory: the ranks used {share} when last seen; {_WAY_OUT}"

    def _count(self) -> Mapping[Path, int]:
        counts = {}
        for path in self._counters:
            for line in _read(path).splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill" and number.isdecimal():
                    counts[path] = int(number)
        return counts


def memory_limit(limits: Sequence[Path] = LIMITS) -> int:
    """The memory there is, in bytes: what JupyterHub allots, the container's share, or all."""
    candidates = [
        os.environ.get(MEMORY_LIMIT_VARIABLE, ""),
        *(_read(path).strip() for path in limits),
    ]
    return min([*map(int, filter(str.isdecimal, candidates)), int(psutil.virtual_memory().total)])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another system, or not for us to read
        return ""
