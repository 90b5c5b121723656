"""Where the rank is: a thread that looks at the main thread once a second and says so."""

from __future__ import annotations

import linecache
import threading
import time
from collections.abc import Callable
from types import FrameType

from nbddp.wire.messages import Pulse
from nbddp.worker.flight_recorder import newest_collective
from nbddp.worker.main_thread import main_frame
from nbddp.worker.usage import Usage
from nbddp.worker.waits import Idleness, waited_in

PERIOD = 1.0  # seconds between two looks
FIRST_LOOK = 0.3  # seconds into a cell: a short one is left alone
HEARTBEAT = 3  # looks after which a sign of life is sent though no cell runs
MAX_CODE = 100  # characters of the line that are shown


class PulseThread:
    """Sends a Pulse at every look while a cell runs, and now and then between cells."""

    def __init__(
        self, post: Callable[[Pulse], None], is_cell_file: Callable[[str], bool], usage: Usage
    ) -> None:
        self._post = post
        self._is_cell_file = is_cell_file
        self._usage = usage
        self._idleness = Idleness()
        self._cell = 0
        self._began_at = 0.0
        self._has_looked = False
        self._last_cell = 0
        self._place: tuple[int, ...] = ()
        self._since = time.monotonic()
        self._begun = threading.Event()

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._sample, name="nbddp-pulse", daemon=True).start()

    def begin_cell(self, cell: int) -> None:
        """A cell begins."""
        self._began_at = time.time()
        self._has_looked = False
        self._cell = self._last_cell = cell
        self._begun.set()

    def end_cell(self) -> None:
        """It is over; if it took long enough to be looked at, say where it ended."""
        if self._has_looked:
            self._post(self.look(self._cell))
        self._cell = 0

    def _sample(self) -> None:
        looks = 0
        while True:
            if self._begun.wait(PERIOD):
                self._begun.clear()
                time.sleep(FIRST_LOOK)
            cell = self._cell
            looks += 1
            self._has_looked = self._has_looked or bool(cell)
            if cell or looks % HEARTBEAT == 0:
                self._post(self.look(cell))

    def look(self, cell: int = 0) -> Pulse:
        """Where the main thread is right now, in this cell or outside any."""
        # a call of its own: a frame that held itself would hold what the cell has left, too
        return self._look_at(main_frame(), cell)

    def _look_at(self, frame: FrameType, cell: int) -> Pulse:
        newest = newest_collective() if self._last_cell else None
        # a loop comes by the same place again, and its frame lies where the last one did
        count = newest.record if newest is not None else 0
        place, now = (cell, id(frame), frame.f_lasti, count), time.monotonic()
        has_stayed = place == self._place
        if not has_stayed:
            self._place, self._since = place, now
        line, code, function = self._in_cell(frame) if cell else (0, "", "")
        is_idle = self._idleness.look()
        is_waited_in = newest is not None and newest.is_in_flight and has_stayed
        wait = str(newest) if is_waited_in else ""
        if cell and has_stayed and is_idle and not wait:
            wait = waited_in(frame, self._is_cell_file)
        is_recent = newest is not None and newest.began_at >= self._began_at
        use = self._usage.read()
        return Pulse(
            cell=cell,
            line=line,
            code=code,
            function=function,
            collective=wait if cell else "",
            last=str(newest) if is_recent or is_waited_in else "",
            last_cell=self._last_cell,
            seconds=now - self._since if has_stayed else 0.0,
            cpu=use.cpu,
            memory=use.memory,
            gpu=use.gpu,
            gpu_memory=use.gpu_memory,
        )

    def _in_cell(self, frame: FrameType) -> tuple[int, str, str]:
        """The innermost line of a cell, its code, and the function that it has called."""
        called, here = "", frame
        while here.f_back is not None and not self._is_cell_file(here.f_code.co_filename):
            called, here = here.f_code.co_name, here.f_back
        filename = here.f_code.co_filename
        if not self._is_cell_file(filename):
            return 0, "", frame.f_code.co_name
        code = linecache.getline(filename, here.f_lineno).strip()
        return here.f_lineno, code[:MAX_CODE], called
