"""How far a node's clock is from the notebook's, by Cristian's algorithm.

A question is sent at ``sent``, answered there at ``there``, and the answer is back at ``back``. If
both ways take the same time, the other clock was ahead by ``there - (sent + back) / 2``; however
unequal they are, the error is at most half of the round trip. The quickest of the last rounds is
believed.

Source: F. Cristian, Probabilistic clock synchronization, Distributed Computing 3 (1989).
"""

from __future__ import annotations

from collections import deque

ROUNDS = 60


class ClockOffset:
    """What is known of another machine's clock.

    >>> clock = ClockOffset()
    >>> clock.add_round(10.0, 13.05, 10.1)
    >>> round(clock.offset, 3), round(clock.error, 3)
    (3.0, 0.05)
    """

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, float]] = deque(maxlen=ROUNDS)

    def add_round(self, sent: float, there: float, back: float) -> None:
        """One question and its answer, in seconds of ``time.time()`` on either machine."""
        self._rounds.append((max(0.0, back - sent) / 2, there - (sent + back) / 2))

    @property
    def offset(self) -> float:
        """Seconds that it is ahead; 0 while nothing is known."""
        return min(self._rounds)[1] if self._rounds else 0.0

    @property
    def error(self) -> float:
        """Seconds by which that may be wrong; infinite while nothing is known."""
        return min(self._rounds)[0] if self._rounds else float("inf")
