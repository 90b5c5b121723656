"""Estimate the steps per second of a rank from the times of its recent steps."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

RATE_WINDOW = 10.0  # seconds over which a step rate is measured
MARK_PERIOD = 0.25  # seconds between two marks
MIN_MARKS = 5  # minimum intervals for a standard error


@dataclass(frozen=True, slots=True)
class StepRate:
    """The last step of a rank, and its steps per second; 0 if unknown.

    Attributes:
        at: the rank's ``time.time()`` at that step: an old rate says nothing about the present.
        seconds: the time over which the rate was measured.
        error: standard error of ``per_second``, as a fraction of it.
        loop: the first metric name that is reported with these steps.
    """

    step: float
    per_second: float
    at: float
    seconds: float = field(default=0.0, compare=False)
    error: float = field(default=inf, compare=False)
    loop: str = field(default="", compare=False)


class RateEstimator:
    """Estimates the step rate of a loop from recent marks; a mark is a time and a step."""

    __slots__ = ("_at", "_cached", "_marks", "_step")

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque()
        self._at = self._step = -inf
        self._cached: StepRate | None = None  # callers read it several times between two steps

    def add(self, at: float, step: float) -> None:
        """Add a step. Drop all marks if the step or the clock moved back."""
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
        """Return the rate over the window, or over one step if that takes longer."""
        if self._cached is None:
            at, step = self._marks[0]
            seconds = self._at - at
            per_second = (self._step - step) / seconds if seconds > 0 else 0.0
            error = self._error(per_second)
            self._cached = StepRate(self._step, per_second, self._at, seconds, error, loop)
        return self._cached

    def _error(self, per_second: float) -> float:
        """Estimate the error from the variation of the time between two marks."""
        count = len(self._marks) - 1
        if count < MIN_MARKS or per_second <= 0:
            return inf
        squares = sum(
            (at - before - (step - from_step) / per_second) ** 2
            for (before, from_step), (at, step) in pairwise(self._marks)
        )
        seconds = self._marks[-1][0] - self._marks[0][0]
        return math.sqrt(squares * count / (count - 1)) / seconds if seconds > 0 else inf
