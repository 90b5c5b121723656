"""Preload modules in the forkserver, in parts between forks, and clean up at its exit.

The modules are those that the first DDP model would import in every rank. Between two parts the
forkserver serves, so that a start waits for one part at most. No import touches CUDA.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver

from nbddp.child_processes import find_descendants, kill_all
from nbddp.wire.rank_start import PRELOAD_SIGNAL, PRELOADED_LATER

# the names of the modules that forked ranks inherit: a restart of the ranks does not reload them
inherited_modules: set[str] = set()


def clean_up_at_exit(folder: str) -> None:
    """Register an exit hook that kills all ranks and deletes the folder.

    The forkserver exits when the kernel has ended. A rank watches the kernel itself, but cannot do
    so while it is stopped (SIGSTOP).
    """
    pid = os.getpid()

    def clear() -> None:
        if os.getpid() != pid:
            return  # a forked rank runs this hook too
        kill_all(lambda: find_descendants(pid))
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(clear)


def reset_in_rank() -> None:
    """In a rank, restore the signal's default action and close the forkserver's pipe.

    The forkserver runs as long as this pipe is open, so only the kernel may hold it.
    multiprocessing passes it on, so that a rank could fork from the same forkserver.
    """
    signal.signal(PRELOAD_SIGNAL, signal.SIG_DFL)
    server = forkserver._forkserver
    held: int | None = server._forkserver_alive_fd  # type: ignore[attr-defined]
    if held is not None:
        os.close(held)
        server._forkserver_alive_fd = None  # type: ignore[attr-defined]


def preload_on_signal(first: Callable[[], None]) -> None:
    """Preload one part at every signal, starting with ``first``.

    Called in the forkserver's main thread.
    """
    parts: list[Callable[[], object]] = [first]
    parts += [partial(importlib.import_module, name) for name in PRELOADED_LATER]

    def do_next(*_signal: object) -> None:
        try:
            if parts:
                parts.pop(0)()
        except Exception:  # noqa: BLE001 - such as a warning under PYTHONWARNINGS=error
            traceback.print_exc()  # a rank that needs the module gets the error
        # here, because reading all names in a rank would copy the memory pages that hold them
        inherited_modules.update(sys.modules)
        gc.collect()
        gc.freeze()  # the ranks' garbage collectors then leave shared memory pages unchanged

    inherited_modules.update(sys.modules)
    gc.freeze()
    signal.signal(PRELOAD_SIGNAL, do_next)
