"""How a rank ends when it is told to: in good order, and without waiting for what cells started.

Python itself would wait for every thread and process that a cell left running, for ever maybe.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import util
from multiprocessing.connection import wait
from typing import Any, NoReturn

from nbddp.child_processes import adopt_orphans, find_descendants, kill_all, terminate_all
from nbddp.worker.output.log_writer import flush_python_streams


def clear_exit_hooks() -> None:
    """Have the process know what cells start and register, and nothing else, when it ends.

    What was registered before is the helper's, such as taking torch's libraries apart: 0.3 s for
    nothing.
    """
    adopt_orphans()
    atexit._clear()
    atexit.register(logging.shutdown)
    finalize: Any = weakref.finalize
    for each in list(finalize._registry):
        each.atexit = False
    finalize._registered_with_atexit = False  # the next one registers itself


def exit_process(close: Callable[[], None]) -> NoReturn:
    """Do what cells registered for the end, end what they started, and go.

    Args:
        close: mails what was printed until then.
    """
    try:
        sys.settrace(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        # torch's handler raises when a worker of a loader is killed
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        steps: list[Callable[[], Any]] = [
            partial(util._run_finalizers, 0),  # type: ignore[attr-defined]  # such as a pool
            atexit._run_exitfuncs,
            partial(terminate_all, lambda: find_descendants(os.getpid())),
            flush_python_streams,
            close,
        ]
        for step in steps:
            try:
                step()
            except BaseException:  # noqa: BLE001 - the rest is done all the same
                traceback.print_exc()
    finally:
        os._exit(0)


def exit_with_kernel(kernel_pid: int) -> None:
    """End this process, and what it started, as soon as the kernel is gone, however it went.

    The kernel holds a pipe. A child that it forked may hold the pipe for longer than it lives, so
    its process is watched too, where the system can.
    """
    parent = multiprocessing.parent_process()
    sentinels = [] if parent is None else [parent.sentinel]
    if hasattr(os, "pidfd_open"):
        with suppress(ProcessLookupError):
            sentinels.append(os.pidfd_open(kernel_pid))
    threading.Thread(
        target=_kill_with_kernel, args=(sentinels,), name="nbddp-watch", daemon=True
    ).start()


def _kill_with_kernel(sentinels: list[int]) -> NoReturn:
    wait(sentinels)
    try:
        kill_all(lambda: find_descendants(os.getpid()))
    finally:  # a cell may have left no descriptor to look with
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)
