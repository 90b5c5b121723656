"""Where steps and values are in a chart, and what stands beside its axes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from nbddp.ui.charts.lines import Line, finite
from nbddp.ui.charts.scale import (
    log_ticks,
    padded,
    say_number,
    say_ticks,
    step_ticks,
    value_ticks,
    wants_log,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

WIDTH, HEIGHT = 360, 190  # CSS pixels
SMALL = 10.0  # size of the numbers
DIGIT = 0.64  # the width of a digit, in sizes of its text


class Scale(Enum):
    """How values are spread over the height."""

    AUTO = "auto"
    LINEAR = "linear"
    LOG = "log"


class Frame:
    """The room inside the axes.

    Args:
        lines: what is drawn there.
        scale: how values are spread over the height.
        is_time: whether it is drawn over seconds, which steps have no parts of.

    Attributes:
        may_be_log: whether all values are above zero.
        lost: how many values were not finite.
    """

    def __init__(
        self, lines: Sequence[Line], scale: Scale = Scale.AUTO, *, is_time: bool = False
    ) -> None:
        self.lost = sum(int(line.lost.sum()) for line in lines)
        ends = _limits([end for line in lines for end in (line.low, line.high)])
        self.may_be_log = bool(ends) and ends[0] > 0
        wants = scale is Scale.LOG or (
            scale is Scale.AUTO and any(wants_log(finite([line.values])) for line in lines)
        )
        self.is_log = self.may_be_log and wants
        limits = np.array(ends or [0.0, 1.0])
        self._y = padded(*self._heights(limits).tolist()) if ends else (0.0, 1.0)
        steps = [float(step) for line in lines for step in (line.steps[0], line.steps[-1])]
        self._x = (min(steps), max(steps)) if steps else (0.0, 0.0)
        if 0 < self._x[0] < 0.01 * self._x[1]:  # the middle of a first bucket that begins at 0
            self._x = (0.0, self._x[1])
        self.x_ticks = self._step_ticks(0.0 if is_time else 1.0) if steps else []
        self.y_ticks = self._value_ticks() if ends else []
        widest = max((len(text) for _, text in self.y_ticks), default=0)
        self.left = 14 + SMALL * DIGIT * max(4, widest)
        self.unit = "step"
        self.restarts = sorted({at for line in lines for at in line.restarts})
        self.right, self.bottom = WIDTH - 8.0, 24.0
        self.top = HEIGHT - 12.0

    @property
    def span(self) -> float:
        """From the first step to the last."""
        return self._x[1] - self._x[0]

    def across(self, steps: Numbers) -> Numbers:
        """Where steps are, from left to right."""
        low, high = self._x
        if low == high:
            return np.full_like(steps, (self.left + self.right) / 2)
        inset = 3.0  # so that the first and the last dot are whole
        width = self.right - self.left - 2 * inset
        return self.left + inset + (steps - low) / (high - low) * width

    def up(self, values: Numbers) -> Numbers:
        """Where values are, from the bottom to the top."""
        low, high = self._y
        room = self.top - self.bottom
        return self.bottom + (self._heights(values) - low) / (high - low) * room

    def grid(self, count: int) -> Numbers:
        """Steps that lie as far apart as so many points would."""
        return np.linspace(*self._x, count)

    def _heights(self, values: Numbers) -> Numbers:
        return np.log10(values) if self.is_log else values

    def _step_ticks(self, least: float) -> list[tuple[float, str]]:
        texts: list[str] = []
        ticks: list[float] = []
        for at_most in (6, 4, 2):
            ticks = step_ticks(*self._x, at_most=at_most, least=least)
            texts = say_ticks(ticks)
            if sum(len(text) + 2 for text in texts) * SMALL * DIGIT < WIDTH - 50:
                break
        return list(zip(ticks, texts, strict=True))

    def _value_ticks(self) -> list[tuple[float, str]]:
        if self.is_log:
            return [(tick, say_number(tick)) for tick in log_ticks(*self._y)]
        ticks = value_ticks(*self._y)
        return list(zip(ticks, say_ticks(ticks), strict=True))


def _limits(parts: Sequence[Numbers]) -> list[float]:
    """The lowest and the highest number, if there are any that are finite."""
    numbers = np.concatenate([*parts, np.empty(0)])
    numbers = numbers[np.isfinite(numbers)]
    return [float(numbers.min()), float(numbers.max())] if len(numbers) else []
