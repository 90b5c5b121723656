"""How often a piece of the panel is drawn: so that it takes its share of a core, and no more.

What is drawn and what a machine can do differ a hundredfold, from two ranks that count steps to 64
that talk. So each piece is timed: the next drawing comes when the last one has been paid for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

Seen = tuple[object, ...]


class RedrawPacer:
    """Draws a piece when it has changed, the first time at once.

    Args:
        share: of a core that drawing may take of its thread.
        least: seconds between two drawings, however cheap they are: eyes see no more.
        most: seconds between two, whatever they cost.
        tick: seconds between two drawings of what has not changed, for times that go on.

    Attributes:
        next_at: when it may be drawn again, as ``time.monotonic()`` has it.
    """

    def __init__(self, share: float, *, least: float, most: float, tick: float = inf) -> None:
        self._share = share
        self._least = least
        self._most = most
        self._tick = tick
        self._next_tick = 0.0
        self._seen: Seen = ()
        self.next_at = 0.0

    def draw(self, seen: Seen, draw: Callable[[], None]) -> None:
        """Draw if what is seen has changed.

        The first of ``seen`` may change all the time. If any other has changed, it is drawn at
        once: somebody has chosen something.
        """
        now, before = time.monotonic(), self._seen
        due = self.next_at if seen != before else self._next_tick
        if now >= due or (before and seen[1:] != before[1:]):
            self._seen = seen
            with self.spending():
                draw()
            self._next_tick = max(self.next_at, now + self._tick)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count what is done within as drawing."""
        began = time.thread_time()  # what others do to a busy machine is not paid for here
        try:
            yield
        finally:
            spent = time.thread_time() - began
            pause = min(self._most, max(self._least, spent / self._share))
            self.next_at = time.monotonic() + pause


def next_redraw(log: RedrawPacer, *others: RedrawPacer) -> float:
    """Return until when nothing is drawn.

    From then on a line is drawn as it comes: it does not wait for the rest, and the rest does not
    wait for lines.
    """
    now = time.monotonic()
    return min([log.next_at, *(other.next_at for other in others if other.next_at > now)])
