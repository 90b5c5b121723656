"""Signal handlers that cells set, kept for cells.

Between two cells there is nothing that an exception of theirs could end but the rank: a time limit
that ends late, or torch's word that a DataLoader's worker was killed. It waits for the next cell.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = sorted(signal.valid_signals() - {signal.SIGINT})
# without the enum around it: this is asked for every signal after every statement of a cell
_get_handler: Callable[[int], Any] = getattr(signal.getsignal, "__wrapped__", signal.getsignal)


class CellSignalHandlers:
    """Takes the handlers of signals away while no cell runs; SIGINT is the interrupter's."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._pending: set[int] = set()
        self._depth = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it they act, also on the signals that came before; a cell may run another."""
        if threading.current_thread() is not threading.main_thread():
            yield  # the cell's own thread, while it runs or after it
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
