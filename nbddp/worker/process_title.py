"""Names of nbddp's processes in ``ps``, ``top`` and ``htop``."""

from __future__ import annotations

import os

# Before the import: else the title overwrites /proc/PID/environ, which other tools read.
os.environ.setdefault("SPT_NOENV", "1")

from setproctitle import setproctitle

FORKSERVER = "nbddp forkserver"


def name_forkserver() -> None:
    """Name this process, from which ranks are forked."""
    setproctitle(FORKSERVER)


def name_rank(rank: int, world_size: int) -> None:
    """Name this rank's process, and the processes that it forks, such as loader workers."""
    title = f"nbddp rank {rank} of {world_size}"
    setproctitle(title)
    os.register_at_fork(after_in_child=lambda: setproctitle(f"{title}: child process"))
