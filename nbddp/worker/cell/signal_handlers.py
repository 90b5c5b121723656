"""Run the signal handlers of cells only while a cell runs.

Between cells, an exception of a handler would end the rank. Examples are a time limit that expires
late, and torch's SIGCHLD handler, which reports a killed DataLoader worker. Such a signal waits for
the next cell.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = sorted(signal.valid_signals() - {signal.SIGINT})
# Avoid the enum conversion: this runs for each signal after each statement of a cell.
_get_handler: Callable[[int], Any] = getattr(signal.getsignal, "__wrapped__", signal.getsignal)


class CellSignalHandlers:
    """Remove signal handlers while no cell runs. CellInterrupter handles SIGINT."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._pending: set[int] = set()
        self._depth = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Restore the handlers in this context, and deliver signals that arrived before.

        Contexts may be nested, because a cell may run another cell.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # a thread that the cell has started
            return
        self._depth += 1
        try:
            while self._handlers:
                signal.signal(*self._handlers.popitem())
            while self._pending:
                signal.raise_signal(self._pending.pop())
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                for number in _SIGNALS:
                    handler = _get_handler(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        signal.signal(number, lambda number, _: self._pending.add(number))
