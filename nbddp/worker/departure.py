"""How a rank ends when it is told to: in good order, and without waiting for what cells started.

Python itself would wait for every thread and process that a cell left running, for ever maybe.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import traceback
import weakref
from collections.abc import Callable
from multiprocessing import util
from typing import Any, NoReturn

from nbddp.descendants import adopt_orphans, descendants, end
from nbddp.worker.streams import flush_python_streams


def prepare_departure() -> None:
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


def depart(close: Callable[[], None]) -> NoReturn:
    """Do what cells registered for the end, end what they started, and go.

    Args:
        close: mails what was printed until then.
    """
    try:
        _be_undisturbed()
        for act in (_finalize, atexit._run_exitfuncs, _end_children, flush_python_streams, close):
            _try(act)
    finally:
        os._exit(0)


def _be_undisturbed() -> None:
    sys.settrace(None)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises when a loader's worker is killed


def _finalize() -> None:
    """What multiprocessing itself ends in good order, such as a pool or a manager."""
    util._run_finalizers(0)  # type: ignore[attr-defined]


def _end_children() -> None:
    end(lambda: descendants(os.getpid()))


def _try(act: Callable[[], Any]) -> None:
    try:
        act()
    except BaseException:  # noqa: BLE001 - the rest is done all the same
        traceback.print_exc()
