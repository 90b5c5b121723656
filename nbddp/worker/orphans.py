"""Nobody outlives the kernel: when it goes, its ranks and their children go too."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import wait
from typing import NoReturn

from nbddp.descendants import descendants, kill


def watch_kernel(kernel_pid: int) -> None:
    """End this process, and what it started, as soon as the kernel is gone, however it went."""
    sentinels = _sentinels(kernel_pid)
    threading.Thread(target=_follow, args=(sentinels,), name="nbddp-watch", daemon=True).start()


def _sentinels(kernel_pid: int) -> list[int]:
    """A pipe that the kernel holds and, where there is one, a handle of its process.

    A child that the kernel forked may hold the pipe open for longer than the kernel lives.
    """
    sentinels = []
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinels.append(parent.sentinel)
    if hasattr(os, "pidfd_open"):
        with suppress(ProcessLookupError):
            sentinels.append(os.pidfd_open(kernel_pid))
    return sentinels


def _follow(sentinels: list[int]) -> NoReturn:
    wait(sentinels)
    try:
        kill(lambda: descendants(os.getpid()))
    finally:  # a cell may have left no descriptor to look with
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)
