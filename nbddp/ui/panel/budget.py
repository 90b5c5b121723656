"""How often a piece of the panel is drawn: so that it takes its share of a core, and no more.

What is drawn and what a machine can do differ a hundredfold, from two ranks that count steps to 64
that talk. So each piece is timed: the next drawing comes when the last one has been paid for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Budget:
    """Says when a piece may be drawn again.

    Args:
        share: of a core that it may take of the thread that draws it.
        least: seconds between two drawings, however cheap they are: eyes see no more.
        most: seconds between two, whatever they cost.

    Attributes:
        next_at: when it may be drawn again, as ``time.monotonic()`` has it.
    """

    def __init__(self, share: float, *, least: float, most: float) -> None:
        self._share = share
        self._least = least
        self._most = most
        self.next_at = 0.0

    def pause(self, spent: float) -> float:
        """Seconds until a drawing is paid for that took so many CPU seconds.

        >>> [Budget(0.02, least=0.1, most=1.0).pause(spent) for spent in (0.001, 0.006, 0.2)]
        [0.1, 0.3, 1.0]
        """
        return min(self._most, max(self._least, spent / self._share))

    @contextmanager
    def spending(self) -> Iterator[None]:
        """What is done within is drawing."""
        began = time.thread_time()  # what others do to a busy machine is not paid for here
        try:
            yield
        finally:
            self.next_at = time.monotonic() + self.pause(time.thread_time() - began)
