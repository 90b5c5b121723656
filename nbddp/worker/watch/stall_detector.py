"""How long the main thread has stayed where it is. Pure: it is told what was seen, and the time.

A loop comes by the same place again and again: the same frame, instruction and collective prove
nothing. A stuck rank also prints nothing, reports no step, starts no collective, uses no CPU and
makes no context switch. Measured once a second with Gloo, a rank that waits for
others makes no context switch and uses no CPU, in whatever it waits; one that sleeps, reads or
writes in a loop makes one switch a round. Library calls that wait for one event may wake by
themselves: for the workers of a DataLoader every five seconds (under 0.1 ms of CPU), in
``subprocess.run`` with a timeout 20 times a second (1.2 ms), in a ``!command`` of IPython 20 times
(3.9 ms). Until such a call returns, a switch proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

THREAD_CPU = 0.005  # seconds of CPU between two looks from which on a thread does not merely wait
# switches between two looks that a wait for others may make: it looks at its deadline
MAX_SWITCHES = 2
PROCESS_PERCENT = 10.0  # percent of a core from which on other threads work for the main one
CHILD_CPU = 0.05  # seconds of CPU between two looks: more than workers use that look for work
CONFIRM_AFTER = 2.0  # seconds in one place after which it is worth a closer look


class BlockingCall(Enum):
    """What the main thread seems to wait in."""

    NONE = auto()
    SEEN = auto()  # its frames are those of a wait for others
    RECORDED = auto()  # torch has begun a collective and not ended it
    SPINNING = auto()  # the same, of a backend that waits with the CPU
    ONE_CALL = auto()  # a library call that returns when one event has happened


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadSample:
    """What is seen of the main thread at one look.

    Attributes:
        place: cell, frame and instruction; while it waits in one library call, cell and call.
        collectives: how many this process has begun.
        reports: how many steps and bars it reported, and how often the main thread printed.
        written: bytes of output, from threads, C code and children too.
        cpu: seconds of CPU that it has used; ``switches`` counts how often it went to sleep.
    """

    place: tuple[object, ...] = ()
    collectives: int = 0
    reports: int = 0
    written: int = 0
    cpu: float = 0.0
    switches: int = 0

    def has_moved(self, before: ThreadSample, wait: BlockingCall) -> bool:
        """Whether the thread did anything since an earlier look."""
        done = (self.place, self.collectives, self.reports)
        if done != (before.place, before.collectives, before.reports):
            return True
        is_computing = self.cpu - before.cpu >= THREAD_CPU
        switches = self.switches - before.switches
        match wait:
            case BlockingCall.SPINNING:
                return False
            case BlockingCall.RECORDED:  # switches: it may ask in a loop whether the work is done
                return is_computing
            case BlockingCall.SEEN:
                return is_computing or switches > MAX_SWITCHES
            case BlockingCall.ONE_CALL:  # it uses a little CPU each time that it wakes
                return self.cpu - before.cpu >= CHILD_CPU or self.written != before.written
            case BlockingCall.NONE:
                return is_computing or switches > 0 or self.written != before.written


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """What a closer look shows of a thread that seems to stay where it is.

    Attributes:
        state: the thread's; "D" while it, or a child, waits for a disk.
        cpu: percent of one core that the whole process uses.
        children: seconds of CPU that its children have used.
        written: bytes that its children have written to anything; always 0 on macOS.
    """

    state: str = ""
    cpu: float = 0.0
    children: float = 0.0
    written: int = 0

    def is_working(self, before: ProcessSample | None) -> bool:
        """Whether a disk, other threads or children are at work for it."""
        have_worked = before is not None and (
            self.children - before.children >= CHILD_CPU or self.written != before.written
        )
        return self.state in ("D", "R") or self.cpu >= PROCESS_PERCENT or have_worked


class StallDetector:
    """Remembers since when nothing has moved."""

    def __init__(self) -> None:
        self._thread_sample = ThreadSample()
        self._process_sample: ProcessSample | None = None
        self._last_progress = 0.0

    def add_thread_sample(self, sample: ThreadSample, wait: BlockingCall, now: float) -> float:
        """How long the thread has stayed where it is, in seconds; 0 if it moves."""
        before, self._thread_sample = self._thread_sample, sample
        if sample.has_moved(before, wait):
            self.reset(now)
        return now - self._last_progress

    def needs_process_sample(self, now: float) -> bool:
        """Whether it has been still for long, or others were at work for it a moment ago."""
        return self._process_sample is not None or now - self._last_progress >= CONFIRM_AFTER

    def add_process_sample(self, sample: ProcessSample, now: float) -> float:
        """The same, when it was found to stay somewhere and to wait for nobody.

        What children do shows between two such looks: however late the first one comes, it proves
        no more than ``CONFIRM_AFTER``.
        """
        before, self._process_sample = self._process_sample, sample
        if sample.is_working(before):
            self._last_progress = now
        seconds = now - self._last_progress
        return seconds if before is not None else min(seconds, CONFIRM_AFTER)

    def reset(self, now: float) -> None:
        """It has."""
        self._last_progress, self._process_sample = now, None
