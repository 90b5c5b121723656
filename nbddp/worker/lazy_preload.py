"""What the forkserver does besides forking: it grows when there is time, and leaves nothing behind.

It imports what DDP's first model would in every rank, and serves between two parts, so that a start
waits for one of them at most. None of it touches CUDA while it is imported.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver

from nbddp.child_processes import find_descendants, kill_all
from nbddp.wire.rank_start import PRELOAD_SIGNAL, PRELOADED_LATER


def clean_up_at_exit(folder: str) -> None:
    """When this process ends, for the kernel is gone, end all ranks, and take this folder away.

    A rank watches the kernel itself, but one that was stopped (SIGSTOP) cannot.
    """
    pid = os.getpid()

    def clear() -> None:
        if os.getpid() != pid:
            return  # a rank that was forked from here
        kill_all(lambda: find_descendants(pid))
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(clear)


def reset_in_rank() -> None:
    """In a rank: let the signal mean what it means anywhere, and close the helper's pipe.

    The pipe keeps the helper running, and is the kernel's alone. multiprocessing hands it on, so
    that a rank could fork from the same helper.
    """
    signal.signal(PRELOAD_SIGNAL, signal.SIG_DFL)
    server = forkserver._forkserver
    held: int | None = server._forkserver_alive_fd  # type: ignore[attr-defined]
    if held is not None:
        os.close(held)
        server._forkserver_alive_fd = None  # type: ignore[attr-defined]


def preload_on_signal(first: Callable[[], None]) -> None:
    """Do one part at every signal, ``first`` first; called in the forkserver's main thread."""
    parts: list[Callable[[], object]] = [first]
    parts += [partial(importlib.import_module, name) for name in PRELOADED_LATER]

    def do_next(*_signal: object) -> None:
        if parts:
            parts.pop(0)()
        gc.collect()
        gc.freeze()  # what ranks share stays shared: their collectors leave it alone

    gc.freeze()
    signal.signal(PRELOAD_SIGNAL, do_next)
