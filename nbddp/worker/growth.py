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

from nbddp.descendants import descendants, kill
from nbddp.wire.helper import GROW_SIGNAL, GROWN_BY


def take_along(folder: str) -> None:
    """When this process ends, for the kernel is gone, end all ranks, and take this folder away.

    A rank watches the kernel itself, but one that was stopped (SIGSTOP) cannot.
    """
    pid = os.getpid()

    def clear() -> None:
        if os.getpid() != pid:
            return  # a rank that was forked from here
        kill(lambda: descendants(pid))
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(clear)


def let_go() -> None:
    """In a rank: let go of the pipe that keeps the helper running, which is the kernel's alone.

    multiprocessing hands it on, so that a rank could fork from the same helper.
    """
    server = forkserver._forkserver
    held: int | None = server._forkserver_alive_fd  # type: ignore[attr-defined]
    if held is not None:
        os.close(held)
        server._forkserver_alive_fd = None  # type: ignore[attr-defined]


def listen(first: Callable[[], None]) -> None:
    """Do one part at every signal, ``first`` first; called in the forkserver's main thread."""
    parts: list[Callable[[], object]] = [
        first,
        *(partial(importlib.import_module, name) for name in GROWN_BY),
    ]

    def do_next(*_signal: object) -> None:
        if parts:
            parts.pop(0)()
        gc.collect()
        gc.freeze()  # what ranks share stays shared: their collectors leave it alone

    gc.freeze()
    signal.signal(GROW_SIGNAL, do_next)


def stop_listening() -> None:
    """In a rank the signal means what it means anywhere."""
    signal.signal(GROW_SIGNAL, signal.SIG_DFL)
