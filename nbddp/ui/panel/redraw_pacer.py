"""Limit how often a part of the panel is drawn, so that drawing takes a fixed fraction of a core.

The cost of a drawing varies by a factor of 100: from 2 ranks that count steps to 64 ranks that
print. So each drawing is timed, and the pause after it is proportional to its cost. A pause is at
most twice as long as the one before, so a single costly drawing, such as the first charts, does not
cause a long delay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

State = tuple[object, ...]  # a version, then values that change rarely


class RedrawPacer:
    """Draws a part of the panel after a change, with pauses.

    Args:
        share: the fraction of a core for drawing.
        least: the shortest pause in seconds.
        most: the longest pause in seconds.
        tick: seconds between two drawings of an unchanged part, for elapsed times.

    Attributes:
        next_at: the ``time.monotonic()`` of the next possible drawing.
    """

    def __init__(self, share: float, *, least: float, most: float, tick: float = inf) -> None:
        self._share = share
        self._least = least
        self._most = most
        self._tick = tick
        self._next_tick = 0.0
        self._pause = least
        self._drawn_state: State = ()
        self.next_at = 0.0

    def draw_if_changed(self, state: State, draw: Callable[[], None]) -> None:
        """Draw if ``state`` has changed.

        The first value of ``state`` is a version, which changes often. If another value has
        changed, such as a choice of the user or the state of the group, draw at once.
        """
        now, drawn = time.monotonic(), self._drawn_state
        due = self.next_at if state != drawn else self._next_tick
        if now >= due or (drawn and state[1:] != drawn[1:]):
            self._drawn_state = state
            began = time.thread_time()  # of this thread only, so a busy machine does not count
            draw()
            wanted = max(self._least, (time.thread_time() - began) / self._share)
            self._pause = min(self._most, wanted, 2 * self._pause)
            self.next_at = time.monotonic() + self._pause
            self._next_tick = max(self.next_at, now + self._tick)


def next_redraw(log: RedrawPacer, *others: RedrawPacer) -> float:
    """Return the time of the next drawing.

    The log and the other parts do not wait for each other.
    """
    now = time.monotonic()
    return min([log.next_at, *(other.next_at for other in others if other.next_at > now)])
