"""How fast a rank makes steps, from marks of the last seconds."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

RATE_WINDOW = 10.0  # seconds that a step rate looks back
MARK_PERIOD = 0.25  # seconds between two marks
MIN_MARKS = 5  # intervals between marks that a standard error needs


@dataclass(frozen=True, slots=True)
class StepRate:
    """The last step of a rank and its steps per second, 0 if that is not known.

    Attributes:
        at: the rank's ``time.time()`` at that step: an old rate says nothing about now.
        seconds: the time over which it was measured.
        error: the standard error of ``per_second``, as a share of it.
        loop: the first name that is reported with these steps.
    """

    step: float
    per_second: float
    at: float
    seconds: float = field(default=0.0, compare=False)
    error: float = field(default=inf, compare=False)
    loop: str = field(default="", compare=False)


class RateEstimator:
    """Estimates how fast a loop is, from marks of the last seconds."""

    __slots__ = ("_at", "_cached", "_marks", "_step")

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque()
        self._at = self._step = -inf
        self._cached: StepRate | None = None  # callers ask several times between two steps

    def add(self, at: float, step: float) -> None:
        """Note a step; forget the marks if the step or the clock fell back."""
        if step == self._step:
            return
        if step < self._step or at < self._at:
            self._marks.clear()
        self._at, self._step, self._cached = at, step, None
        if not self._marks or at - self._marks[-1][0] >= MARK_PERIOD:
            self._marks.append((at, step))
        while len(self._marks) > 1 and at - self._marks[1][0] >= RATE_WINDOW:
            self._marks.popleft()

    def rate(self, loop: str) -> StepRate:
        """Return the rate over the window, or over one step where that takes longer."""
        if self._cached is None:
            at, step = self._marks[0]
            seconds = self._at - at
            per_second = (self._step - step) / seconds if seconds > 0 else 0.0
            error = self._error(per_second)
            self._cached = StepRate(self._step, per_second, self._at, seconds, error, loop)
        return self._cached

    def _error(self, per_second: float) -> float:
        """Estimate the error from how much the time between two marks varies."""
        count = len(self._marks) - 1
        if count < MIN_MARKS or per_second <= 0:
            return inf
        squares = sum(
            (at - before - (step - from_step) / per_second) ** 2
            for (before, from_step), (at, step) in pairwise(self._marks)
        )
        seconds = self._marks[-1][0] - self._marks[0][0]
        return math.sqrt(squares * count / (count - 1)) / seconds if seconds > 0 else inf
