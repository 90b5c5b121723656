"""When the log of a panel is drawn, and when all else of it."""

from __future__ import annotations

import time
from collections.abc import Callable

from nbddp.ui.panel.budget import Budget

LOG_PERIOD = 0.1  # seconds between two redraws of the log
LOG_SHARE = 0.015  # of a core; where that is not enough it is drawn less often,
MAX_LOG_PERIOD = 0.3  # down to this
REST_PERIOD = 0.25  # seconds between two of all else, unless the group or the cell changes
REST_SHARE = 0.01
MAX_REST_PERIOD = 1.0
TICK = 0.5  # seconds between two redraws of it when nothing comes in: times go on

Seen = tuple[object, ...]


class Rhythm:
    """Draws what has changed, the first time at once.

    Attributes:
        next_at: until when nothing is drawn, as ``time.monotonic()`` has it. From then on a line is
            drawn as it comes: it does not wait for the rest, and the rest does not wait for lines.
    """

    def __init__(self) -> None:
        self._log = Budget(LOG_SHARE, least=LOG_PERIOD, most=MAX_LOG_PERIOD)
        self._rest = Budget(REST_SHARE, least=REST_PERIOD, most=MAX_REST_PERIOD)
        self._seen_log: Seen = ()
        self._seen: Seen = ()
        self._next_tick = 0.0
        self.next_at = 0.0

    def draw_log(self, seen: Seen, draw: Callable[[], None]) -> None:
        """Draw the log if it is another one than was seen, and if it may be drawn."""
        if seen != self._seen_log and time.monotonic() >= self._log.next_at:
            self._seen_log = seen
            with self._log.spending():
                draw()
        self._note_next()

    def draw_rest(self, seen: Seen, draw: Callable[[], None]) -> None:
        """The same for the rest, where the first of what is seen changes all the time.

        If more has changed it is drawn at once: a button may be pressed now, or may not.
        """
        now, before = time.monotonic(), self._seen
        due = self._rest.next_at if seen != before else self._next_tick
        if now >= due or seen[1:] != before[1:]:
            self._seen = seen
            with self._rest.spending():
                draw()
            self._next_tick = max(self._rest.next_at, now + TICK)
        self._note_next()

    def _note_next(self) -> None:
        self.next_at = self._log.next_at
        if time.monotonic() < self._rest.next_at < self._log.next_at:
            self.next_at = self._rest.next_at
