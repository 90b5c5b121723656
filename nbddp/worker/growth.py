"""What the forkserver does when there is time: import what DDP's first model would in every rank.

It serves between two parts, so that a start waits for one of them at most. None of it touches CUDA
while it is imported.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import shutil
import signal
from collections.abc import Callable

MODULES = ("sympy", "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
PARTS = 1 + len(MODULES)
FOLDER = "NBDDP_SOCKETS"  # the environment variable that names it
GROW_SIGNAL = signal.SIGUSR1


def take_along(folder: str) -> None:
    """Take this folder away when this process ends: the kernel may have been killed."""
    pid = os.getpid()

    def remove() -> None:
        if os.getpid() == pid:  # no rank that was forked from here
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


def listen(first: Callable[[], None]) -> None:
    """Do one part at every signal, ``first`` first; called in the forkserver's main thread."""
    modules = list(MODULES)
    has_begun = False

    def do_next(*_signal: object) -> None:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            first()
        elif modules:
            importlib.import_module(modules.pop(0))
        gc.collect()
        gc.freeze()  # what ranks share stays shared: their collectors leave it alone

    gc.freeze()
    signal.signal(GROW_SIGNAL, do_next)


def stop_listening() -> None:
    """In a rank the signal means what it means anywhere."""
    signal.signal(GROW_SIGNAL, signal.SIG_DFL)
