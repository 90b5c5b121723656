"""A script's place among processes: a program is nobody's child, and has none when it begins."""

from __future__ import annotations

import itertools
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
        yield
    finally:
        vars(module).update(before)
