"""A script's place among processes: a program is nobody's child, and has none when it begins."""

from __future__ import annotations

import itertools
import multiprocessing.forkserver
import multiprocessing.process
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any


class _MainProcess(BaseProcess):
    """What multiprocessing has in a process that it has not started; it hides its own class."""

    def __init__(self) -> None:
        self._identity = ()
        self._name = "MainProcess"
        self._parent_pid = None
        self._popen = None
        self._closed = False
        self._config = {"semprefix": "/mp"}
        self.authkey = os.urandom(32)

    def close(self) -> None:
        """Nobody closes it."""


@contextmanager
def family_of_its_own() -> Iterator[None]:
    """Within it what the cells started is neither seen nor waited for."""
    module: Any = multiprocessing.process
    new: dict[str, Any] = {
        "_current_process": _MainProcess(),
        "_parent_process": None,
        "_process_counter": itertools.count(1),
        "_children": set(),
    }
    before = {name: getattr(module, name) for name in new}
    vars(module).update(new)
    try:
        with _forkserver_of_its_own():
            yield
    finally:
        vars(module).update(before)


_METHODS = ("ensure_running", "get_inherited_fds", "connect_to_new_process")


@contextmanager
def _forkserver_of_its_own() -> Iterator[None]:
    module: Any = multiprocessing.forkserver
    server = module.ForkServer()
    new = {"_forkserver": server, "set_forkserver_preload": server.set_forkserver_preload}
    new |= {name: getattr(server, name) for name in _METHODS}
    before = {name: getattr(module, name) for name in new}
    vars(module).update(new)
    try:
        yield
    finally:
        vars(module).update(before)
        server._stop()
