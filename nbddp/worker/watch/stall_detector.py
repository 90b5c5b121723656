"""Detect how long the main thread has made no progress, from samples and their times.

A loop reaches the same line repeatedly, so the same frame, instruction and collective prove
nothing. A stuck rank also prints nothing, reports no step, starts no collective, uses no CPU and
makes no context switch.

Measured once a second with Gloo, a rank that waits for other ranks makes no context switch and uses
no CPU, in any kind of wait. A rank that sleeps, reads or writes in a loop makes one switch per
iteration. Library calls that wait for one event may wake by themselves: a DataLoader that waits for
its workers every five seconds (under 0.1 ms of CPU), ``subprocess.run`` with a timeout 20 times a
second (1.2 ms), a ``!command`` of IPython 20 times (3.9 ms). Until such a call returns, a switch
proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

THREAD_CPU = 0.005  # seconds of CPU between samples; a thread that uses as much is computing
# switches between samples that a wait for other ranks may make to check its deadline
MAX_SWITCHES = 2
PROCESS_PERCENT = 10.0  # percent of a core; if the process uses as much, other threads work
CHILD_CPU = 0.05  # seconds of CPU between samples; idle worker processes use less
CONFIRM_AFTER = 2.0  # seconds without progress after which to sample the process


class BlockingCall(Enum):
    """The kind of call that the main thread seems to wait in."""

    NONE = auto()
    ON_STACK = auto()  # the stack shows a wait for other ranks
    RECORDED = auto()  # torch has recorded a collective that has not ended
    SPINNING = auto()  # the same, with a backend whose waits use the CPU
    ONE_EVENT = auto()  # a library call that returns after one event


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadSample:
    """A sample of the main thread.

    Attributes:
        position: cell, frame and instruction; in a library call that waits for one event, the call.
        collectives: the number of collectives that this process has started.
        reports: the number of reported steps and bars, and of prints by the main thread.
        written: bytes of output, including those of threads, C code and child processes.
        cpu: seconds of CPU used by the main thread.
        switches: how often the main thread went to sleep.
    """

    position: tuple[object, ...] = ()
    collectives: int = 0
    reports: int = 0
    written: int = 0
    cpu: float = 0.0
    switches: int = 0

    def has_moved(self, before: ThreadSample, wait: BlockingCall) -> bool:
        """Return whether the thread has made progress since an earlier sample."""
        done = (self.position, self.collectives, self.reports)
        if done != (before.position, before.collectives, before.reports):
            return True
        is_computing = self.cpu - before.cpu >= THREAD_CPU
        switches = self.switches - before.switches
        match wait:
            case BlockingCall.SPINNING:
                return False
            case BlockingCall.RECORDED:  # not switches: it may poll in a loop
                return is_computing
            case BlockingCall.ON_STACK:
                return is_computing or switches > MAX_SWITCHES
            case BlockingCall.ONE_EVENT:  # each wake uses a little CPU
                return self.cpu - before.cpu >= CHILD_CPU or self.written != before.written
            case BlockingCall.NONE:
                return is_computing or switches > 0 or self.written != before.written


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """A sample of the whole process, taken if the main thread seems to make no progress.

    Attributes:
        state: the state of the main thread; "D" while it, or a child process, waits for a disk.
        cpu: the CPU use of the process, in percent of one core.
        children: seconds of CPU that child processes have used.
        written: bytes that child processes have written to any file; always 0 on macOS.
        runnable: the threads, also of child processes, that run or wait for a core, each with its
            number of voluntary switches; always empty on macOS.
    """

    state: str = ""
    cpu: float = 0.0
    children: float = 0.0
    written: int = 0
    runnable: frozenset[tuple[str, str]] = frozenset()

    def is_working(self, before: ProcessSample | None) -> bool:
        """Return whether a disk, other threads or child processes work for the main thread."""
        have_worked = before is not None and (
            self.children - before.children >= CHILD_CPU
            or self.written != before.written
            # such a thread has not slept since; on a busy machine it may get little CPU
            or bool(self.runnable & before.runnable)
        )
        return self.state in ("D", "R") or self.cpu >= PROCESS_PERCENT or have_worked


class StallDetector:
    """Measure the time without progress."""

    def __init__(self) -> None:
        self._thread_sample = ThreadSample()
        self._process_sample: ProcessSample | None = None
        self._last_progress = 0.0

    def add_thread_sample(self, sample: ThreadSample, wait: BlockingCall, now: float) -> float:
        """Add a sample. Return the seconds without progress."""
        before, self._thread_sample = self._thread_sample, sample
        if sample.has_moved(before, wait):
            self.reset(now)
        return now - self._last_progress

    def needs_process_sample(self, now: float) -> bool:
        """Return whether a process sample is needed to confirm that nothing happens."""
        return self._process_sample is not None or now - self._last_progress >= CONFIRM_AFTER

    def add_process_sample(self, sample: ProcessSample, now: float) -> float:
        """Add a process sample after a thread sample without progress, as a confirmation.

        Return the seconds without progress. The work of child processes shows only between two
        process samples, so the first one confirms at most ``CONFIRM_AFTER`` seconds.
        """
        before, self._process_sample = self._process_sample, sample
        if sample.is_working(before):
            self._last_progress = now
        seconds = now - self._last_progress
        return seconds if before is not None else min(seconds, CONFIRM_AFTER)

    def reset(self, now: float) -> None:
        """Record progress at this time."""
        self._last_progress, self._process_sample = now, None
