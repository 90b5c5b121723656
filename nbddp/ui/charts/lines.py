"""The numbers behind a chart's lines: curves as arrays, thinned, averaged, smoothed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp
from typing import TYPE_CHECKING

import numpy as np

from nbddp.record.metrics import Curve

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

MAX_STEPS = 2000  # that a mean is taken at
LAG = 0.05  # of the steps: a rank that is further behind is not waited for
SMOOTHING = 0.02  # of the width: how far a smooth line looks back


@dataclass(frozen=True, slots=True)
class Line:
    """A curve, as arrays."""

    steps: Numbers
    values: Numbers
    low: Numbers
    high: Numbers
    lost: Numbers
    last: float
    restarts: tuple[float, ...] = ()

    @classmethod
    def of(cls, curve: Curve) -> Line:
        """Return the curve as arrays."""
        steps, values, lost = map(_numbers, (curve.steps, curve.mean, curve.nonfinite))
        is_each = curve.low is curve.mean is curve.high  # one value in every bucket
        low, high = (values, values) if is_each else map(_numbers, (curve.low, curve.high))
        return cls(steps, values, low, high, lost, curve.last, curve.resume_points)

    def thinned(self, grid: Numbers) -> Line:
        """With the points put together that lie between two steps of a grid."""
        cells = np.searchsorted(grid, self.steps, side="right")
        starts = np.flatnonzero(np.diff(cells, prepend=-1))
        if len(starts) == len(cells):
            return self
        is_there = np.isfinite(self.values)
        counts = np.add.reduceat(is_there.astype(np.float64), starts)
        totals = np.add.reduceat(np.where(is_there, self.values, 0.0), starts)
        return Line(
            np.add.reduceat(self.steps, starts) / np.diff(starts, append=len(cells)),
            np.divide(totals, counts, out=np.full_like(totals, np.nan), where=counts > 0),
            np.fmin.reduceat(self.low, starts),  # these two pass over NaN
            np.fmax.reduceat(self.high, starts),
            np.add.reduceat(self.lost, starts),
            self.last,
        )

    def smoothed(self, span: float) -> Numbers:
        """A mean at each point of those before it, which weigh less the more steps they are away.

        Args:
            span: the steps of the whole chart.
        """
        reach = max(span * SMOOTHING, 1e-9)
        smooth = np.full_like(self.values, np.nan)
        total = weight = 0.0
        before = self.steps[0] if len(self.steps) else 0.0
        for index, (step, value) in enumerate(zip(self.steps, self.values, strict=True)):
            fade = exp(max(-700.0, (before - step) / reach))
            total, weight, before = total * fade, weight * fade, step
            if np.isfinite(value):
                total, weight = total + value, weight + 1.0
                smooth[index] = total / weight
        return smooth


def _numbers(field: Sequence[float]) -> Numbers:
    return np.array(field, dtype=np.float64)


def lines_of(curves: Mapping[int, Curve]) -> dict[int, Line]:
    """Those that have points, in order of rank."""
    return {rank: Line.of(curve) for rank, curve in sorted(curves.items()) if curve.steps}


def current(lines: Sequence[Line]) -> list[Line]:
    """Those that go on: not of a rank that was lost long ago."""
    if not lines:
        return []
    newest = max(line.steps[-1] for line in lines)
    span = newest - min(line.steps[0] for line in lines)
    return [line for line in lines if newest - line.steps[-1] <= LAG * span]


def mean(lines: Sequence[Line]) -> Line:
    """The mean over ranks, as far as all have come that go on: else its end would be restless."""
    steps = np.unique(np.concatenate([line.steps for line in lines]))
    steps = steps[steps <= min(line.steps[-1] for line in current(lines))]
    steps = steps[:: ceil(len(steps) / MAX_STEPS)]
    totals, counts = np.zeros_like(steps), np.zeros_like(steps)
    for line in lines:
        here = (steps >= line.steps[0]) & (steps <= line.steps[-1])
        totals[here] += np.interp(steps[here], line.steps, line.values)
        counts += here
    is_known = counts > 0  # where steps are as large as can be, one that counts on is not above
    steps, means = steps[is_known], totals[is_known] / counts[is_known]
    return Line(steps, means, means, means, np.zeros_like(steps), means[-1])


def spread(lines: Sequence[Line], grid: Numbers) -> Line:
    """From the lowest to the highest value of any rank, between any two steps of a grid."""
    low, high = np.full(len(grid) + 1, np.nan), np.full(len(grid) + 1, np.nan)
    for line in lines:
        cells = np.searchsorted(grid, line.steps, side="right")
        np.fmin.at(low, cells, line.low)
        np.fmax.at(high, cells, line.high)
    edges = np.concatenate([grid, grid[-1:]])
    is_there = np.isfinite(low)
    steps, low, high = edges[is_there], low[is_there], high[is_there]
    return Line(steps, (low + high) / 2, low, high, np.zeros_like(steps), np.nan)


def newest(lines: Sequence[Line]) -> float | None:
    """The mean of the newest values, None if there are none."""
    values = [line.last for line in current(lines)]
    return sum(values) / len(values) if values else None


def finite(parts: Sequence[Numbers]) -> list[float]:
    """All numbers that are."""
    numbers = np.concatenate([*parts, np.empty(0)])
    return list(numbers[np.isfinite(numbers)].tolist())


def runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where it is true, as beginnings and ends of slices."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
