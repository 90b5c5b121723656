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
from types import ModuleType

from nbddp.child_processes import find_descendants, kill_all
from nbddp.wire.rank_start import PRELOAD_SIGNAL, PRELOADED_LATER

# the names of the modules that forked ranks inherit: a restart of the ranks does not reload them
inherited_modules: set[str] = set()
_newest_inherited: list[tuple[str, ModuleType]] = []


def imported_modules() -> list[ModuleType]:
    """Return the modules that this rank has imported itself, the newest first.

    It reads the newest entries of ``sys.modules`` only. To read all of them would copy the memory
    pages that hold them: 5 to 18 ms in each of four ranks on two cores.
    """
    end = _newest_inherited[0] if _newest_inherited else None
    # in C: other threads may import meanwhile
    newest = list(iter(partial(next, reversed(sys.modules.items())), end))
    return [module for name, module in newest if name not in inherited_modules]


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
        gc.collect()
        _record_inherited()

    _record_inherited()
    signal.signal(PRELOAD_SIGNAL, do_next)


def _record_inherited() -> None:
    # here, because reading all names in a rank would copy the memory pages that hold them
    inherited_modules.update(sys.modules)
    _newest_inherited[:] = [next(reversed(sys.modules.items()))]
    gc.freeze()  # the ranks' garbage collectors then leave shared memory pages unchanged
