"""Where the rank is: a thread that looks at the main thread once a second and says so.

In a cell that has collectives it also notes 20 times a second on which line the main thread is.
"""

from __future__ import annotations

import linecache
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import FrameType

from nbddp.errors import say_place
from nbddp.wire.collective import Collective
from nbddp.wire.messages import Pulse
from nbddp.wire.timing_messages import Arrivals
from nbddp.worker.arriving import Arriving
from nbddp.worker.flight_recorder import RecordedCollective, newest_of
from nbddp.worker.main_thread import innermost_in_cell, main_cpu_time, main_frame, main_status
from nbddp.worker.stillness import Closer, Stillness, Trace, Wait
from nbddp.worker.usage import Usage, Use, children_use
from nbddp.worker.waits import functions_in, mark_of_call, waited_in, waiting_thread

logger = logging.getLogger(__name__)

PERIOD = 1.0  # seconds between two looks
FIRST_LOOK = 0.3  # seconds into a cell: a short one is left alone
SAMPLE_PERIOD = 0.05  # seconds between two samples, on average
HEARTBEAT = 3  # beats after which it is looked though no cell runs
AT_LEAST = 5  # heartbeats of which one is sent though nothing has changed
MUCH = 2.0  # percent of a core, or of the memory: less is no news between cells
MAX_CODE = 100  # characters of the line that are shown


class PulseThread:
    """Sends a Pulse at every look while a cell runs, and now and then between cells.

    Args:
        post: sends it.
        is_cell_file: whether code of this file name is a cell's.
        usage: reads what the process uses.
        said: how often the cell reported or printed something, and how many bytes are written.
        name_of: what a script's file is called, or another cell; empty for the cell that runs.
        asks: what waits for the user's answer.
        steps: the last reported step of each loop.
    """

    def __init__(
        self,
        post: Callable[[Pulse | Arrivals], None],
        is_cell_file: Callable[[str], bool],
        usage: Usage,
        said: Callable[[], tuple[int, int]] = lambda: (0, 0),
        name_of: Callable[[str], str] = lambda _filename: "",
        asks: Callable[[], str] = lambda: "",
        steps: Callable[[], dict[str, int]] = dict,
    ) -> None:
        self._post = post
        self._said = said
        self._name_of = name_of
        self._asks = asks
        self._steps = steps
        self._is_cell_file = is_cell_file
        self._usage = usage
        self._stillness = Stillness()
        self._cell = 0
        self._began_at = 0.0
        self._has_looked = False
        self._spans_cell = True
        self._last_cell = 0
        self._told: Pulse | None = None
        self._call: object = None  # the mark of the library call that the main thread waits in
        self._arriving = Arriving(post, is_cell_file, name_of)
        self._begun = threading.Event()

    def start(self) -> None:
        """Begin to look."""
        self._arriving.start()
        threading.Thread(target=self._sample, name="nbddp-pulse", daemon=True).start()

    def tell_anew(self) -> None:
        """Whoever hears it from here on has heard nothing yet."""
        self._told = None

    def begin_cell(self, cell: int) -> None:
        """A cell begins, and with it what is known of the rank begins anew."""
        self.tell_anew()
        self._began_at = time.time()
        self._has_looked = False
        self._arriving.begin_cell(cell, self._began_at)
        self._cell = self._last_cell = cell
        self._begun.set()

    def end_cell(self) -> None:
        """It is over; if it took long enough to be looked at, say where it ended."""
        if self._has_looked:
            self._tell(self.look(self._cell))
        self._spans_cell = not self._has_looked
        self._arriving.end_cell(is_short=not self._has_looked)
        self._cell = 0

    def _sample(self) -> None:
        chance = Random()  # the module's own numbers are the user's, and may be seeded
        while True:
            self._await_beat(chance)
            try:
                self._look_once()
            except (OSError, MemoryError):  # a cell has used up what the process may have
                logger.debug("could not look at this rank", exc_info=True)

    def _await_beat(self, chance: Random) -> None:
        """Wait until it is time to look, and take samples meanwhile.

        All ranks of a machine look at the same moments: their reader is woken for once. Samples
        are in step with nothing.
        """
        period = PERIOD if self._cell else PERIOD * HEARTBEAT
        now = time.monotonic()
        due = now - now % period + period
        has_begun = False
        while (left := due - time.monotonic()) > 0:
            is_sampling = self._arriving.has_met
            if is_sampling:
                left = min(left, SAMPLE_PERIOD * chance.uniform(0.5, 1.5))
            if self._begun.wait(left):
                self._begun.clear()
                due = due if has_begun else time.monotonic() + FIRST_LOOK
                has_begun = True
            elif is_sampling:
                self._arriving.sample()

    def _look_once(self) -> None:
        cell = self._cell
        self._has_looked = self._has_looked or bool(cell)
        beat = round(time.monotonic() / PERIOD)
        if cell:
            self._tell(self.look(cell))
        elif beat % HEARTBEAT == 0:
            self.look_between_cells(is_due=beat % (HEARTBEAT * AT_LEAST) == 0)

    def _tell(self, pulse: Pulse) -> None:
        self._told = pulse
        self._post(pulse)

    def look_between_cells(self, *, is_due: bool) -> None:
        """Look, and tell what is new: most looks between cells see what the one before has seen."""
        pulse = self.look()
        if self._spans_cell:  # so its CPU is not that of a rank that does nothing
            self._spans_cell, pulse = False, replace(pulse, cpu=-1.0)
        if is_due or self._told is None or _is_news(pulse, self._told):
            self._tell(pulse)

    def look(self, cell: int = 0) -> Pulse:
        """Where the main thread is right now, in this cell or outside any."""
        # a call of its own: a frame that held itself would hold what the cell has left, too
        return self._look_at(main_frame(), cell)

    def _look_at(self, frame: FrameType, cell: int) -> Pulse:
        entries = self._arriving.tell() if self._last_cell else []
        newest = newest_of(entries, functions_in(frame))
        use = self._usage.read()
        kind, wait = self._wait(cell, frame, newest)
        begun = int(entries[-1]["record_id"]) if entries else 0  # on any thread
        seconds = self._stay(cell, frame, begun, kind, use)
        is_waited_in = wait is not None and seconds > 0
        is_recorded = is_waited_in and kind is not Wait.SEEN
        is_recent = newest is not None and newest.began_at >= self._began_at
        line, file, code, function = self._in_cell(frame) if cell else (0, "", "", "")
        return Pulse(
            cell=cell,
            line=line,
            file=file,
            code=code,
            function=function,
            collective=wait if is_waited_in else None,
            last=newest.call if newest and (is_recent or is_recorded) else None,
            last_cell=self._last_cell,
            thread=self._thread(frame) if is_recorded else "",
            seconds=seconds,
            cpu=use.cpu,
            memory=use.memory,
            gpu=use.gpu,
            gpu_name=use.gpu_name,
            gpu_memory=use.gpu_memory,
            gpu_reserved=use.gpu_reserved,
            asks=self._asks(),
            steps=self._steps(),
        )

    def _wait(
        self, cell: int, frame: FrameType, newest: RecordedCollective | None
    ) -> tuple[Wait, Collective | None]:
        """What a cell seems to wait in: the kind of wait, and the call."""
        if not cell:
            return Wait.NONE, None
        if newest is not None and newest.is_in_flight:
            spins = newest.backend == "nccl"  # its kernels are waited for with the CPU
            return Wait.SPINNING if spins else Wait.RECORDED, newest.call
        name = waited_in(frame, self._is_cell_file)
        self._call = None if name else mark_of_call(frame)
        if self._call is not None:
            return Wait.ONE_CALL, None
        return (Wait.SEEN, Collective(name)) if name else (Wait.NONE, None)

    def _stay(self, cell: int, frame: FrameType, begun: int, kind: Wait, use: Use) -> float:
        """For how long the main thread has stayed here; 0 if it moves."""
        now = time.monotonic()
        switches, state = main_status()
        said, written = self._said()
        is_one_call = kind is Wait.ONE_CALL
        trace = Trace(
            place=(cell, id(self._call)) if is_one_call else (cell, id(frame), frame.f_lasti),
            collectives=begun,
            said=said,
            written=written,
            cpu=main_cpu_time(),
            switches=switches,
        )
        seconds = self._stillness.look(trace, kind, now)
        waits_for_others = kind is not Wait.NONE and not is_one_call
        if not cell or waits_for_others or not self._stillness.wants_closer_look(now):
            return seconds
        if is_one_call and state == "R":
            state = "S"  # it has just woken, or waits for a core: neither is work
        children = children_use()
        closer = Closer(
            state="D" if children.is_reading else state,
            cpu=use.cpu,
            children=children.cpu_time,
            written=children.written,
        )
        return self._stillness.look_closer(closer, now)

    def _thread(self, frame: FrameType) -> str:
        """Name the thread that waits; empty if the main thread is in torch.distributed itself."""
        other = None if functions_in(frame) else waiting_thread()
        if other is None:
            return ""
        here, _ = innermost_in_cell(other, self._is_cell_file)
        if here is None:
            return "a background thread"
        file = self._name_of(here.f_code.co_filename)
        return f"a background thread ({say_place(here.f_lineno, file)})"

    def _in_cell(self, frame: FrameType) -> tuple[int, str, str, str]:
        """The innermost line of a cell, its file, its code, and the function that it has called."""
        here, called = innermost_in_cell(frame, self._is_cell_file)
        if here is None:
            return 0, "", "", called
        filename = here.f_code.co_filename
        code = linecache.getline(filename, here.f_lineno).strip()
        return here.f_lineno, self._name_of(filename), code[:MAX_CODE], called


def _is_news(pulse: Pulse, told: Pulse) -> bool:
    """Whether anything that one sees of a rank between cells is another than was told."""
    pairs = (
        (pulse.memory, told.memory),
        (pulse.gpu_memory, told.gpu_memory),
        (pulse.gpu_reserved, told.gpu_reserved),
    )
    return (
        (pulse.cell, pulse.last_cell, pulse.asks) != (told.cell, told.last_cell, told.asks)
        or abs(pulse.cpu - told.cpu) > MUCH
        or any(abs(now - before) > before * MUCH / 100 for now, before in pairs)
    )
