"""Modules that take seconds to import, in a notebook whose stop button may be pressed meanwhile."""

from __future__ import annotations

import importlib
import threading

from nbddp.interrupts import begin
from nbddp.promise import Promise, kept


def import_aside(name: str) -> None:
    """Import a module in a thread of its own, and wait for it.

    An interrupt ends the wait alone. One that strikes in CPython's own import code can leave its
    lock taken, and then every other thread that imports anything waits for good (seen in 3.11: a
    stop in a first cell's first milliseconds, while another thread imported torch). One that breaks
    matplotlib's off leaves a half of it in ``sys.modules``, which nobody can import any more.
    """
    imported: Promise[None] = Promise()

    def load() -> None:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            imported.set_exception(error)
        else:
            imported.set_result(None)

    begin(threading.Thread(target=load, name="nbddp-import", daemon=True))
    kept(imported)
