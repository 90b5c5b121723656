"""End a rank: run its exit hooks and save its files.

Do not wait for threads or processes that cells started. Python itself waits for all of them,
possibly forever.
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

from torch.utils.data import _utils as loader_utils

from nbddp.child_processes import adopt_orphans, find_descendants, kill_all, terminate_all
from nbddp.worker.open_files import SAVE_TIMEOUT, OpenFiles
from nbddp.worker.output.log_writer import flush_python_streams

HOOKS_TIMEOUT = 2.0  # seconds; the controller kills a rank that has not ended after --grace
_HOOKS_RUN = (
    "nbddp: functions of atexit still run: the open files are flushed, but gzip, xz, bz2 and zip "
    "files are incomplete if the rank is killed before these functions return"
)


def clear_exit_hooks() -> None:
    """Remove inherited exit hooks, so that only hooks of this process and its cells run at exit.

    The inherited hooks belong to the forkserver. Unloading torch's libraries, for example, takes
    0.3 s and has no use here.
    """
    adopt_orphans()
    atexit._clear()
    atexit.register(logging.shutdown)
    finalize: Any = weakref.finalize
    for info in list(finalize._registry):
        info.atexit = False
    finalize._registered_with_atexit = False  # the next finalizer registers itself


def exit_process(close: Callable[[], None], *, code: int = 0) -> NoReturn:
    """Run the exit hooks that cells registered, save files, end child processes, and exit.

    Args:
        close: sends the remaining output.
        code: the exit code.
    """
    has_run_hooks, is_saved, files = threading.Event(), threading.Event(), OpenFiles()

    def flush_early() -> None:
        if not has_run_hooks.wait(HOOKS_TIMEOUT):
            open_files = OpenFiles()
            _run_all(open_files.flush, open_files.print_unsaved)
            print(_HOOKS_RUN, file=sys.stderr, flush=True)  # noqa: T201 - into the log

    def end() -> None:
        is_saved.wait(SAVE_TIMEOUT)
        terminate_children = partial(terminate_all, lambda: find_descendants(os.getpid()))
        try:
            _run_all(files.print_unsaved, terminate_children, flush_python_streams, close)
        finally:
            os._exit(code)

    try:
        sys.settrace(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        # torch's handler raises if a DataLoader worker is killed
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        run_finalizers = partial(util._run_finalizers, 0)  # type: ignore[attr-defined]
        # torch's exit hook, without which a deleted loader waits for its workers
        run_torch_hook = loader_utils._set_python_exit_flag
        early = threading.Thread(target=flush_early, daemon=True)  # in case that a hook blocks
        _run_all(early.start, run_finalizers, atexit._run_exitfuncs, run_torch_hook)
        has_run_hooks.set()
        ending = threading.Thread(target=end, daemon=True)  # in case that a file blocks this one
        _run_all(ending.start, files.save)
        is_saved.set()
        if ending.is_alive():
            ending.join()
        end()  # no thread could be started
    finally:
        os._exit(code)


def _run_all(*steps: Callable[[], Any]) -> None:
    for step in steps:
        try:
            step()
        except BaseException:  # noqa: BLE001 - the other steps must still run
            traceback.print_exc()


def exit_with_kernel(kernel_pid: int) -> None:
    """End this process and its children as soon as the kernel has ended, for any reason.

    The kernel holds a pipe that this process watches. A child that the kernel forked may keep the
    pipe open for longer, so the kernel's process is watched too, where the system can.
    """
    parent = multiprocessing.parent_process()
    sentinels = [] if parent is None else [parent.sentinel]
    if hasattr(os, "pidfd_open"):
        with suppress(ProcessLookupError):
            sentinels.append(os.pidfd_open(kernel_pid))
    watch = partial(_kill_with_kernel, sentinels)
    threading.Thread(target=watch, name="nbddp-watch", daemon=True).start()


def _kill_with_kernel(sentinels: list[int]) -> NoReturn:
    # On the nbddp-watch thread.
    wait(sentinels)
    try:
        kill_all(lambda: find_descendants(os.getpid()))
    except OSError:  # a cell may have used up all file descriptors
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGKILL)
    finally:
        os._exit(1)
