"""Sample the rank once a second from a thread, and send its status.

In a cell with collectives, the thread also records the line of the main thread 20 times a second.
"""

from __future__ import annotations

import linecache
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from random import Random
from types import FrameType

from nbddp.accelerator import is_device_backend
from nbddp.formatting import format_line
from nbddp.wire.collective import Collective
from nbddp.wire.collective_arrivals import CollectiveArrivals
from nbddp.wire.messages import JsonDict, RankStatus, ResourceUsage
from nbddp.worker.output.log_writer import LogWriter
from nbddp.worker.output.metric_sink import MetricSink
from nbddp.worker.watch import main_thread
from nbddp.worker.watch.arrival_recorder import ArrivalRecorder
from nbddp.worker.watch.flight_recorder import RecordedCollective, newest_of
from nbddp.worker.watch.resource_usage import UsageSampler, sample_process
from nbddp.worker.watch.stall_detector import BlockingCall, StallDetector, ThreadSample

logger = logging.getLogger(__name__)

PERIOD = 1.0  # seconds between samples in a cell
FIRST_SAMPLE = 0.3  # seconds; a shorter cell is not sampled
SAMPLE_PERIOD = 0.05  # mean seconds between samples of the line
PERIODS_BETWEEN_CELLS = 3  # PERIODs between samples while no cell runs
SAMPLES_PER_STATUS = 5  # between cells, one in this many samples is sent even without a change
MIN_CHANGE = 2.0  # percent of a core or of memory; smaller changes are not sent between cells
MAX_CODE = 100  # characters of a line to show


@dataclass(eq=False, repr=False)
class Sampler:
    """Send a RankStatus once a second while a cell runs, and less often between cells.

    Args:
        post: sends a status.
        is_cell_file: returns whether a file name belongs to a cell or a script.
        name_of_file: returns the name to show for a file.
        usage: reads the resource usage of the process.
        log: shows whether the cell has printed something.
        metric_sink: shows whether the cell has reported something.
        waiting_for: returns what the cell waits for the user to enter; "" if it does not wait.
    """

    _post: Callable[[RankStatus | CollectiveArrivals], None]
    _is_cell_file: Callable[[str], bool]
    _name_of_file: Callable[[str], str]
    _usage: UsageSampler
    _log: LogWriter
    _metric_sink: MetricSink
    _waiting_for: Callable[[], str]

    def __post_init__(self) -> None:
        self._stall_detector = StallDetector()
        self._cell = self._last_cell = 0
        self._began_at = 0.0
        self._has_sampled = False
        self._spans_cell = True  # whether the next CPU value covers a part of a cell
        self._last_sent: RankStatus | None = None
        self._arrivals = ArrivalRecorder(self._post, self._is_cell_file, self._name_of_file)
        self._cell_started = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="nbddp-sampler", daemon=True).start()

    def force_next_status(self) -> None:
        """Send the next status even if it has not changed, for a new reader."""
        self._last_sent = None

    def begin_cell(self, cell: int) -> None:
        """Start to sample a cell."""
        self.force_next_status()
        self._began_at = time.time()
        self._has_sampled = False
        self._arrivals.begin_cell(cell, self._began_at)
        self._cell = self._last_cell = cell
        self._cell_started.set()

    def end_cell(self) -> None:
        """End a cell. Send a last status, unless the cell was too short to be sampled."""
        if self._has_sampled:
            self._send(self.sample(self._cell))
        self._spans_cell = not self._has_sampled
        self._arrivals.end_cell(is_short=not self._has_sampled)
        self._cell = 0

    def _run(self) -> None:
        # On the nbddp-sampler thread.
        rng = Random()  # not the module's generator, which the user may have seeded
        while True:
            self._sample_until_due(rng)
            beat = round(time.monotonic() / PERIOD)
            try:
                if cell := self._cell:
                    self._has_sampled = True
                    self._send(self.sample(cell))
                elif beat % PERIODS_BETWEEN_CELLS == 0:
                    periods = PERIODS_BETWEEN_CELLS * SAMPLES_PER_STATUS
                    self.sample_between_cells(is_due=beat % periods == 0)
            except (OSError, MemoryError):  # the cell has used up a limit of the process
                logger.debug("could not sample this rank", exc_info=True)

    def _sample_until_due(self, rng: Random) -> None:
        """Wait until the next status is due. Meanwhile, sample the line of the main thread.

        All ranks of a machine send their status at the same instants, so that their reader wakes
        once. Lines are sampled at random instants.
        """
        period = PERIOD if self._cell else PERIOD * PERIODS_BETWEEN_CELLS
        now = time.monotonic()
        due = now - now % period + period
        has_begun = False
        while (seconds := due - time.monotonic()) > 0:
            is_sampling = self._arrivals.has_collectives
            if is_sampling:
                seconds = min(seconds, SAMPLE_PERIOD * rng.uniform(0.5, 1.5))
            if self._cell_started.wait(seconds):
                self._cell_started.clear()
                due = due if has_begun else time.monotonic() + FIRST_SAMPLE
                has_begun = True
            elif is_sampling:
                self._arrivals.sample()

    def _send(self, status: RankStatus) -> None:
        self._last_sent = status
        self._post(status)

    def sample_between_cells(self, *, is_due: bool) -> None:
        """Sample the rank, and send the status if it has changed or is due."""
        status = self.sample()
        if self._spans_cell:
            self._spans_cell, status = False, replace(status, cpu=-1.0)
        if is_due or self._last_sent is None or _has_changed(status, self._last_sent):
            self._send(status)

    def sample(self, cell: int = 0) -> RankStatus:
        """Return the current status in a cell, or between cells if ``cell`` is 0."""
        # a separate call: a frame that refers to itself would keep the cell's objects alive
        return self._build_status(main_thread.main_frame(), cell)

    def _build_status(self, frame: FrameType, cell: int) -> RankStatus:
        entries = self._arrivals.report() if self._last_cell else []
        newest = newest_of(entries, main_thread.functions_in(frame))
        usage = self._usage.read()
        kind, wait, mark = self._find_wait(cell, frame, newest)
        thread_sample = ThreadSample(
            # the mark, not its id: Python may reuse the id of a deleted mark
            position=(cell, id(frame), frame.f_lasti) if mark is None else (cell, mark),
            collectives=int(entries[-1]["record_id"]) if entries else 0,  # by all threads
            reports=self._metric_sink.report_count + self._log.print_count,
            written=self._log.position(),
            cpu=main_thread.main_cpu_time(),
            switches=main_thread.main_switches(),
        )
        seconds = self._seconds_stalled(thread_sample, kind, usage)
        is_waited_in = wait is not None and seconds > 0
        is_recorded = is_waited_in and kind is not BlockingCall.ON_STACK
        is_recent = newest is not None and newest.began_at >= self._began_at
        return RankStatus(
            cell=cell,
            **(self._line_in_cell(frame) if cell else {"line": 0, "function": ""}),
            collective=wait if is_waited_in else None,
            last=newest.call if newest and (is_recent or is_recorded) else None,
            last_cell=self._last_cell,
            thread=self._waiting_thread(frame) if is_recorded else "",
            seconds=seconds,
            **asdict(usage),
            asks=self._waiting_for(),
            importing=main_thread.imported_module(frame, self._is_cell_file) if cell else "",
            steps=dict(self._metric_sink.steps),
        )

    def _find_wait(
        self, cell: int, frame: FrameType, newest: RecordedCollective | None
    ) -> tuple[BlockingCall, Collective | None, object]:
        """Return the kind of wait that a cell seems to be in, the collective, and the call's mark.

        The mark is None except for library calls that wait for one event.
        """
        if not cell:
            return BlockingCall.NONE, None, None
        if newest is not None and not newest.is_in_flight:
            newest = None
        if newest is not None and is_device_backend(newest.backend):
            return BlockingCall.SPINNING, newest.call, None  # NCCL waits for its kernels on the CPU
        call = None if newest is None else newest.call
        if call is None and (name := main_thread.blocking_call(frame, self._is_cell_file)):
            return BlockingCall.ON_STACK, Collective(name), None
        if (mark := main_thread.mark_event_wait(frame)) is not None:
            return BlockingCall.ONE_EVENT, call, mark
        return BlockingCall.NONE if call is None else BlockingCall.RECORDED, call, None

    def _seconds_stalled(
        self, sample: ThreadSample, kind: BlockingCall, usage: ResourceUsage
    ) -> float:
        """Return for how many seconds the main thread has made no progress."""
        now, cell = time.monotonic(), sample.position[0]
        waits_for_event = kind is BlockingCall.ONE_EVENT
        seconds = self._stall_detector.add_thread_sample(sample, kind, now)
        waits_for_others = kind is not BlockingCall.NONE and not waits_for_event
        if not cell or waits_for_others or not self._stall_detector.needs_process_sample(now):
            return seconds
        state = main_thread.main_state()
        if waits_for_event and state == "R":
            state = "S"  # it has just woken, or waits for a core; neither is work
        return self._stall_detector.add_process_sample(sample_process(state, usage.cpu), now)

    def _waiting_thread(self, frame: FrameType) -> str:
        """Name a background thread that waits, or "" if the main thread is in torch.distributed."""
        other = None if main_thread.functions_in(frame) else main_thread.waiting_thread()
        if other is None:
            return ""
        here, _ = main_thread.innermost_in_cell(other, self._is_cell_file)
        if here is None:
            return "a background thread"
        file = self._name_of_file(here.f_code.co_filename)
        return f"a background thread ({format_line(main_thread.line_of(here), file)})"

    def _line_in_cell(self, frame: FrameType) -> JsonDict:
        """Return the innermost line of a cell, and the name of the function that it called."""
        here, called = main_thread.innermost_in_cell(frame, self._is_cell_file)
        if here is None:
            return {"line": 0, "function": called}
        filename, line = here.f_code.co_filename, main_thread.line_of(here)
        file, code = self._name_of_file(filename), linecache.getline(filename, line).strip()
        return {"line": line, "file": file, "code": code[:MAX_CODE], "function": called}


def _has_changed(status: RankStatus, last_sent: RankStatus) -> bool:
    """Return whether a status between cells differs visibly from the last one sent."""
    sizes = ("memory", "gpu_memory", "gpu_reserved")
    pairs = [(getattr(status, name), getattr(last_sent, name)) for name in sizes]
    if any(abs(now - before) > before * MIN_CHANGE / 100 for now, before in pairs):
        return True
    facts, sent = ((each.cell, each.last_cell, each.asks) for each in (status, last_sent))
    return facts != sent or abs(status.cpu - last_sent.cpu) > MIN_CHANGE
