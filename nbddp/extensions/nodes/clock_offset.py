"""Measure the clock offset between a node and the notebook with Cristian's algorithm.

A request is sent at ``sent``, answered at ``there``, and the answer arrives at ``back``. If both
ways take the same time, the other clock is ahead by ``there - (sent + back) / 2``. In any case the
error is at most half of the round trip, so the fastest of the last rounds is used.

Source: F. Cristian, Probabilistic clock synchronization, Distributed Computing 3 (1989).
"""

from __future__ import annotations

from collections import deque

ROUNDS = 60


class ClockOffset:
    """The offset of another machine's clock.

    >>> clock = ClockOffset()
    >>> clock.add_round(10.0, 13.05, 10.1)
    >>> round(clock.offset, 3), round(clock.error, 3)
    (3.0, 0.05)
    """

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, float]] = deque(maxlen=ROUNDS)

    def add_round(self, sent: float, there: float, back: float) -> None:
        """Add a request and its answer; all times are ``time.time()`` of their machine."""
        self._rounds.append((max(0.0, back - sent) / 2, there - (sent + back) / 2))

    @property
    def offset(self) -> float:
        """Seconds by which the other clock is ahead; 0 before the first round."""
        return min(self._rounds)[1] if self._rounds else 0.0

    @property
    def error(self) -> float:
        """The largest possible error of the offset, in seconds; infinite before the first round."""
        return min(self._rounds)[0] if self._rounds else float("inf")
