"""How a running cell is interrupted: in Python by a signal, in a collective by its connections.

SIGINT does not reach Python while C++ waits in a collective: the handler runs when the main
thread is back in Python. So if it has not run shortly after the signal, the wait itself is ended.
A cell that catches KeyboardInterrupt to clean up is told once and left to it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from nbddp.worker.main_thread import main_frame, main_thread_id

PATIENCE = 0.1  # seconds that Python gets to react to the signal before a wait is broken open
INSISTENCE = 4.0  # seconds after which freeing the cell is left to the controller


class Interrupter:
    """Turns one Interrupt message into a KeyboardInterrupt in the running cell."""

    def __init__(
        self,
        *,
        is_cell_file: Callable[[str], bool],
        break_open: Callable[[list[int]], None],
        tell_noticed: Callable[[int], None],
    ) -> None:
        self._is_cell_file = is_cell_file
        self._break_open = break_open
        self._tell_noticed = tell_noticed
        self._ended = threading.Event()
        self._ended.set()
        self._cell = 0
        self._handled = 0
        self.was_asked = False

    def begin_cell(self, cell: int) -> None:
        """A cell begins; whatever handler an earlier one installed is replaced."""
        signal.signal(signal.SIGINT, self._on_sigint)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self._cell = cell
        self.was_asked = False
        self._ended.clear()

    def end_cell(self) -> None:
        """The cell is over: later signals and messages are for nobody."""
        self._ended.set()

    def interrupt(self, cell: int, peers: list[int]) -> None:
        """Interrupt this cell if it still runs; called on the control thread."""
        if cell != self._cell or self._ended.is_set():
            return
        self.was_asked = True
        before, place, has_told = self._handled, self._place(), False
        signal.pthread_kill(main_thread_id(), signal.SIGINT)
        deadline = time.monotonic() + INSISTENCE
        while not self._ended.wait(PATIENCE) and time.monotonic() < deadline:
            is_noticed = self._handled > before
            if is_noticed and not has_told:
                has_told = True
                self._tell_noticed(cell)
            place, last = self._place(), place
            if not is_noticed or (place == last and self._waits_in_torch()):
                self._break_open(peers)

    def _on_sigint(self, _signum: int, frame: FrameType | None) -> None:
        self._handled += 1
        if not self._ended.is_set() and self._is_in_cell(frame):
            raise KeyboardInterrupt

    def _is_in_cell(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if self._is_cell_file(frame.f_code.co_filename):
                return True
            frame = frame.f_back
        return False

    def _place(self) -> tuple[int, int]:
        frame = main_frame()
        return id(frame), frame.f_lasti

    def _waits_in_torch(self) -> bool:
        return "torch/distributed" in main_frame().f_code.co_filename
