"""Interrupt a call, or let a signal handler run, at every instruction at which Python does so."""

from __future__ import annotations

import dis
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

# After these instructions CPython checks for pending signals (``CHECK_EVAL_BREAKER`` in its
# ceval.c; the names of 3.11 to 3.13).
LOOKED_AFTER = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")


class Stop:
    """A trace function that sends this thread a signal at one of these instructions."""

    def __init__(self, place: int, number: signal.Signals = signal.SIGINT) -> None:
        self.was_sent = False
        self._number = number
        self._places_left = place
        self._last: dict[FrameType, str] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Stop:
        frame.f_trace_opcodes = True
        if event == "opcode":
            last = self._last.get(frame, "")
            self._last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if last.startswith(LOOKED_AFTER):
                self._places_left -= 1
                if self._places_left < 0:
                    self.was_sent = True
                    sys.settrace(None)
                    signal.raise_signal(self._number)  # to the current handler
        return self


def interrupted_at(place: int, act: Callable[[], object], *errors: type[BaseException]) -> bool:
    """Make a call, interrupted at one of its places. Return whether it has that place.

    It ends then with KeyboardInterrupt or with one of these errors.
    """
    stop = Stop(place)
    # a generator has its own "exception being handled": CPython 3.11 leaves it set if a trace
    # function raises at the end of an except block
    next(_make_call(act, stop, (KeyboardInterrupt, *errors)))
    return stop.was_sent


def _make_call(
    act: Callable[[], object], stop: Stop, errors: tuple[type[BaseException], ...]
) -> Iterator[None]:
    before = sys.gettrace()
    try:
        sys.settrace(stop)
        act()
    except errors:
        assert stop.was_sent
    finally:
        sys.settrace(before)
    yield


def interrupted_everywhere(act: Callable[[], object]) -> Iterator[int]:
    """Repeat a call, interrupted at its first place, its second, and so on to its last."""
    place = 0
    # a Condition's wait can raise "cannot release un-acquired lock"
    while interrupted_at(place, act, RuntimeError):
        yield place
        place += 1


def handled_everywhere(
    act: Callable[[], object], handle: Callable[[], object], *, every: int = 1
) -> Iterator[int]:
    """Repeat a call; in each, a signal handler runs at another place: the first, ``every`` later.

    The handler ends, and the call goes on.
    """
    signal.signal(signal.SIGUSR1, lambda *_: handle())
    stop, place = Stop(0), 0
    while place == 0 or stop.was_sent:
        stop = Stop(place, signal.SIGUSR1)
        before = sys.gettrace()
        sys.settrace(stop)
        try:
            act()
        finally:
            sys.settrace(before)
        yield place
        place += every
