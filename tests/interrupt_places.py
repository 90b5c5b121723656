"""A stop at every place of a piece of work where Python looks for one."""

from __future__ import annotations

import dis
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

# After these instructions CPython looks whether a signal has come (``CHECK_EVAL_BREAKER`` in its
# ceval.c; the names of 3.10 to 3.13).
LOOKED_AFTER = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")


class Stop:
    """Sends this thread SIGINT at one of the places where it would take it up."""

    def __init__(self, place: int) -> None:
        self.was_sent = False
        self._left = place
        self._last: dict[FrameType, str] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Stop:
        frame.f_trace_opcodes = True
        if event == "opcode":
            last = self._last.get(frame, "")
            self._last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if last.startswith(LOOKED_AFTER):
                self._left -= 1
                if self._left < 0:
                    self.was_sent = True
                    sys.settrace(None)
                    signal.raise_signal(signal.SIGINT)  # to the current handler
        return self


def interrupted_everywhere(act: Callable[[], object]) -> Iterator[int]:
    """Do it again and again, stopped at its first place, at its second, and so to its last."""
    place = 0
    before = sys.gettrace()
    while True:
        stop = Stop(place)
        try:
            sys.settrace(stop)
            act()
        except (KeyboardInterrupt, RuntimeError):  # a Condition's wait may say it so: "cannot
            assert stop.was_sent  # release un-acquired lock"
        finally:
            sys.settrace(before)
        if not stop.was_sent:
            return
        yield place
        place += 1
