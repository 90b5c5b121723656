"""A thread that looks once a second at what the rank does, and reports it.

In a cell that has collectives it also notes 20 times a second on which line the main thread is.
"""

from __future__ import annotations

import linecache
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from random import Random
from types import FrameType
from typing import NamedTuple

from nbddp.errors import format_place
from nbddp.wire.collective import Collective
from nbddp.wire.messages import JsonDict, RankStatus
from nbddp.wire.timing_messages import CollectiveArrivals
from nbddp.worker.cell.shell import RankShell
from nbddp.worker.watch.collective_arrivals import ArrivalRecorder
from nbddp.worker.watch.flight_recorder import RecordedCollective, newest_of
from nbddp.worker.watch.main_thread import (
    blocking_call,
    functions_in,
    innermost_in_cell,
    line_of,
    main_cpu_time,
    main_frame,
    main_status,
    mark_of_call,
    waiting_thread,
)
from nbddp.worker.watch.resource_usage import ResourceUsage, UsageSampler, children_use
from nbddp.worker.watch.stall_detector import (
    BlockingCall,
    ProcessSample,
    StallDetector,
    ThreadSample,
)

logger = logging.getLogger(__name__)

PERIOD = 1.0  # seconds between two looks
FIRST_LOOK = 0.3  # seconds into a cell: a shorter one is not looked at
SAMPLE_PERIOD = 0.05  # seconds between two samples, on average
HEARTBEAT = 3  # periods between two looks while no cell runs
AT_LEAST = 5  # heartbeats of which one is sent though nothing has changed
MUCH = 2.0  # percent of a core, or of the memory: less is not reported between cells
MAX_CODE = 100  # characters of the line that are shown


class Progress(NamedTuple):
    """What the rank has done so far.

    Attributes:
        said: how often the cell reported or printed something.
        written: bytes in the log.
        asks: what waits for the user's answer.
        steps: the last reported step of each loop.
    """

    said: int = 0
    written: int = 0
    asks: str = ""
    steps: JsonDict = {}  # noqa: RUF012 - never changed


class Sampler:
    """Sends a RankStatus at every look while a cell runs, and now and then between cells.

    Args:
        post: sends it.
        shell: knows the files of cells and scripts.
        usage: reads what the process uses.
        progress: reads what the rank has done.
    """

    def __init__(
        self,
        post: Callable[[RankStatus | CollectiveArrivals], None],
        shell: RankShell,
        usage: UsageSampler,
        progress: Callable[[], Progress] = Progress,
    ) -> None:
        self._post = post
        self._shell = shell
        self._usage = usage
        self._progress = progress
        self._stillness = StallDetector()
        self._cell = self._last_cell = 0
        self._began_at = 0.0
        self._has_looked = False
        self._spans_cell = True  # whether the next CPU figure is partly that of a cell
        self._told: RankStatus | None = None
        self._arrivals = ArrivalRecorder(post, shell)
        self._begun = threading.Event()

    def start(self) -> None:
        """Start to look, and to note waits for data."""
        self._arrivals.start()
        threading.Thread(target=self._run, name="nbddp-sampler", daemon=True).start()

    def forget_told(self) -> None:
        """Report the next look whatever it shows: another reader has seen none."""
        self._told = None

    def begin_cell(self, cell: int) -> None:
        """A cell begins."""
        self.forget_told()
        self._began_at = time.time()
        self._has_looked = False
        self._arrivals.begin_cell(cell, self._began_at)
        self._cell = self._last_cell = cell
        self._begun.set()

    def end_cell(self) -> None:
        """A cell has ended: report a last look, unless it was too short for any."""
        if self._has_looked:
            self._report(self.look(self._cell))
        self._spans_cell = not self._has_looked
        self._arrivals.end_cell(is_short=not self._has_looked)
        self._cell = 0

    def _run(self) -> None:
        chance = Random()  # the module's own numbers are the user's, and may be seeded
        while True:
            self._sample_until_due(chance)
            beat = round(time.monotonic() / PERIOD)
            try:
                if cell := self._cell:
                    self._has_looked = True
                    self._report(self.look(cell))
                elif beat % HEARTBEAT == 0:
                    self.look_between_cells(is_due=beat % (HEARTBEAT * AT_LEAST) == 0)
            except (OSError, MemoryError):  # a cell has used up what the process may have
                logger.debug("could not look at this rank", exc_info=True)

    def _sample_until_due(self, chance: Random) -> None:
        """Wait until it is time to look, and take samples meanwhile.

        All ranks of a machine look at the same instants, so that their reader wakes once. Samples
        are at random instants.
        """
        period = PERIOD if self._cell else PERIOD * HEARTBEAT
        now = time.monotonic()
        due = now - now % period + period
        has_begun = False
        while (left := due - time.monotonic()) > 0:
            is_sampling = self._arrivals.has_met
            if is_sampling:
                left = min(left, SAMPLE_PERIOD * chance.uniform(0.5, 1.5))
            if self._begun.wait(left):
                self._begun.clear()
                due = due if has_begun else time.monotonic() + FIRST_LOOK
                has_begun = True
            elif is_sampling:
                self._arrivals.sample()

    def _report(self, pulse: RankStatus) -> None:
        self._told = pulse
        self._post(pulse)

    def look_between_cells(self, *, is_due: bool) -> None:
        """Look, and report what is new: between cells that is little."""
        pulse = self.look()
        if self._spans_cell:
            self._spans_cell, pulse = False, replace(pulse, cpu=-1.0)
        if is_due or self._told is None or _is_news(pulse, self._told):
            self._report(pulse)

    def look(self, cell: int = 0) -> RankStatus:
        """Return where the main thread is right now, in this cell or outside of any."""
        # a call of its own: a frame that held itself would also hold what the cell has left
        return self._look_at(main_frame(), cell)

    def _look_at(self, frame: FrameType, cell: int) -> RankStatus:
        entries = self._arrivals.report() if self._last_cell else []
        newest = newest_of(entries, functions_in(frame))
        use, progress = self._usage.read(), self._progress()
        kind, wait, mark = self._wait(cell, frame, newest)
        seen = ThreadSample(
            # the mark itself: Python would give the id of one that is gone to the next
            place=(cell, id(frame), frame.f_lasti) if mark is None else (cell, mark),
            collectives=int(entries[-1]["record_id"]) if entries else 0,  # of all threads
            said=progress.said,
            written=progress.written,
        )
        seconds = self._stay(seen, kind, use)
        is_waited_in = wait is not None and seconds > 0
        is_recorded = is_waited_in and kind is not BlockingCall.SEEN
        is_recent = newest is not None and newest.began_at >= self._began_at
        return RankStatus(
            cell=cell,
            **(self._place_in_cell(frame) if cell else {"line": 0, "function": ""}),
            collective=wait if is_waited_in else None,
            last=newest.call if newest and (is_recent or is_recorded) else None,
            last_cell=self._last_cell,
            thread=self._thread(frame) if is_recorded else "",
            seconds=seconds,
            **asdict(use),
            asks=progress.asks,
            steps=progress.steps,
        )

    def _wait(
        self, cell: int, frame: FrameType, newest: RecordedCollective | None
    ) -> tuple[BlockingCall, Collective | None, object]:
        """Return the kind of wait that a cell seems to be in, the collective, and the call's mark.

        The mark is None except for library calls that wait for one event.
        """
        if not cell:
            return BlockingCall.NONE, None, None
        if newest is not None and newest.is_in_flight:
            spins = newest.backend == "nccl"  # its kernels are waited for with the CPU
            return BlockingCall.SPINNING if spins else BlockingCall.RECORDED, newest.call, None
        if name := blocking_call(frame, self._shell.is_cell_file):
            return BlockingCall.SEEN, Collective(name), None
        mark = mark_of_call(frame)
        return BlockingCall.NONE if mark is None else BlockingCall.ONE_CALL, None, mark

    def _stay(self, seen: ThreadSample, kind: BlockingCall, use: ResourceUsage) -> float:
        """Return how long the main thread has stayed where it is; 0 if it moves."""
        now, cell = time.monotonic(), seen.place[0]
        switches, state = main_status()
        is_one_call = kind is BlockingCall.ONE_CALL
        trace = replace(seen, cpu=main_cpu_time(), switches=switches)
        seconds = self._stillness.look(trace, kind, now)
        waits_for_others = kind is not BlockingCall.NONE and not is_one_call
        if not cell or waits_for_others or not self._stillness.wants_closer_look(now):
            return seconds
        if is_one_call and state == "R":
            state = "S"  # it has just woken, or waits for a core: neither is work
        children = children_use()
        closer = ProcessSample(
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
        here, _ = innermost_in_cell(other, self._shell.is_cell_file)
        if here is None:
            return "a background thread"
        file = self._shell.name_of_file(here.f_code.co_filename)
        return f"a background thread ({format_place(line_of(here), file)})"

    def _place_in_cell(self, frame: FrameType) -> JsonDict:
        """Return the innermost line of a cell, and the function that it has called."""
        here, called = innermost_in_cell(frame, self._shell.is_cell_file)
        if here is None:
            return {"line": 0, "function": called}
        filename, line = here.f_code.co_filename, line_of(here)
        file, code = self._shell.name_of_file(filename), linecache.getline(filename, line).strip()
        return {"line": line, "file": file, "code": code[:MAX_CODE], "function": called}


def _is_news(pulse: RankStatus, told: RankStatus) -> bool:
    """Return whether the user would see a difference between cells."""
    sizes = ("memory", "gpu_memory", "gpu_reserved")
    pairs = [(getattr(pulse, name), getattr(told, name)) for name in sizes]
    return (
        (pulse.cell, pulse.last_cell, pulse.asks) != (told.cell, told.last_cell, told.asks)
        or abs(pulse.cpu - told.cpu) > MUCH
        or any(abs(now - before) > before * MUCH / 100 for now, before in pairs)
    )
