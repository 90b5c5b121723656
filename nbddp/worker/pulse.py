"""Where the rank is: a thread that looks at the main thread once a second and says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import FrameType

from nbddp.wire.messages import Pulse
from nbddp.worker.collectives import newest_collective
from nbddp.worker.main_thread import main_frame

PERIOD = 1.0  # seconds between two looks
HEARTBEAT = 3  # looks after which a sign of life is sent though no cell runs


class PulseThread:
    """Sends a Pulse at every look while a cell runs, and now and then between cells."""

    def __init__(self, post: Callable[[Pulse], None], is_cell_file: Callable[[str], bool]) -> None:
        self._post = post
        self._is_cell_file = is_cell_file
        self._cell = 0
        self._place: tuple[int, int, int] = (0, 0, 0)
        self._since = time.monotonic()

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._run, name="nbddp-pulse", daemon=True).start()

    def begin_cell(self, cell: int) -> None:
        """A cell begins."""
        self._cell = cell

    def end_cell(self) -> None:
        """It is over."""
        self._cell = 0

    def _run(self) -> None:
        looks = 0
        while True:
            time.sleep(PERIOD)
            cell = self._cell
            looks += 1
            if cell or looks % HEARTBEAT == 0:
                self._post(self._look(cell))

    def _look(self, cell: int) -> Pulse:
        frame = main_frame()
        place, now = (cell, id(frame), frame.f_lasti), time.monotonic()
        has_stayed = place == self._place
        if not has_stayed:
            self._place, self._since = place, now
        line, function = self._in_cell(frame) if cell else (0, "")
        newest = newest_collective() if cell and has_stayed else None
        return Pulse(
            cell=cell,
            line=line,
            function=function,
            collective=str(newest) if newest is not None and newest.is_in_flight else "",
            seconds=now - self._since,
        )

    def _in_cell(self, frame: FrameType) -> tuple[int, str]:
        """The innermost line of a cell, and the function that it has called."""
        called, here = "", frame
        while here.f_back is not None and not self._is_cell_file(here.f_code.co_filename):
            called, here = here.f_code.co_name, here.f_back
        is_in_cell = self._is_cell_file(here.f_code.co_filename)
        return (here.f_lineno, called) if is_in_cell else (0, frame.f_code.co_name)
