"""The limit of open files: macOS's default of 256 is enough for 20 ranks."""

from __future__ import annotations

import os
import resource
import sys

from nbddp.errors import RequestError

FILES_PER_RANK = 8  # in this process: two pipes, five connections of the store, and one spare
SPARE_FILES = 64  # for the forkserver, the store, and the files of a cell


def raise_file_limit(ranks: int, forkserver: int | None = None) -> None:
    """Raise the limit of open files, in this process and in the ranks, as far as ranks need.

    At the limit, the store and the forkserver accept no connection and stop answering.

    Args:
        ranks: the number of ranks that are about to start.
        forkserver: the process id of the forkserver; its ranks inherit its limit.

    Raises:
        RequestError: the system does not allow so many open files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/dev/fd")) + FILES_PER_RANK * ranks + SPARE_FILES  # noqa: PTH208
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise RequestError(
            f"{ranks} ranks need {needed} open files in this process, and its limit is {hard}: "
            "start fewer ranks, or raise the limit (`ulimit -Hn`) where Jupyter starts"
        )
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    if forkserver is not None and sys.platform == "linux":
        resource.prlimit(forkserver, resource.RLIMIT_NOFILE, (needed, hard))
