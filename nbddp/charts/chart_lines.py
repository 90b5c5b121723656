"""The content of a chart: lines with bands, marks, and notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, isfinite
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from nbddp.charts.axes import AxisScale, format_number, wants_log
from nbddp.charts.palette import INK, rank_color
from nbddp.formatting import plural
from nbddp.record.metrics import MAX_FINITE, Curve

Numbers = NDArray[np.float64]

RESTART = "#d9822b"
HEAL = "#2e9e44"
MANY_RANKS = 8  # above that, only the lowest and the highest rank have a line, with a band
MAX_POINTS = 160  # of a drawn line
MAX_DOTS = 25  # a line with more points has dots only at isolated points
MAX_STEPS = 2000  # of a mean line
MAX_LAG = 0.05  # fraction of the steps; the mean line does not wait for ranks further behind
SMOOTHING = 0.02  # fraction of the width over which a smooth line averages


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A line, with ascending steps.

    Attributes:
        values: the mean at each step, NaN where no value is finite.
        low: the lowest finite value at each step; ``high`` is the highest.
        nonfinite: the number of values at each step that are not finite.
        last: the newest value, finite or not.
        label: "rank 3", "mean", or the letter of a run.
        key: the text in the legend.
        color: an index into the palette; None for a mean of ranks.
    """

    steps: Numbers
    values: Numbers
    low: Numbers
    high: Numbers
    nonfinite: Numbers
    last: float
    label: str = ""
    key: str = ""
    color: int | None = None
    is_strong: bool = False

    @property
    def css_color(self) -> str:
        """The colour on a page with an unknown theme."""
        return INK if self.color is None else rank_color(self.color)

    @property
    def has_band(self) -> bool:
        """Whether the lowest and the highest value differ at some step."""
        return bool((self.low < self.high).any())

    @property
    def dots(self) -> NDArray[np.bool_]:
        """A mask of the points with a dot: all of few points, else those without a neighbour."""
        is_finite = np.isfinite(self.values)
        if is_finite.sum() <= MAX_DOTS:
            return is_finite
        padded: NDArray[np.bool_] = np.pad(is_finite, 1)
        return is_finite & ~padded[:-2] & ~padded[2:]

    def logarithms(self) -> ChartLine:
        """Return the line of the logarithms, without zeros."""
        low, values, high = (
            np.log10(np.where(numbers == 0, np.nan, numbers))
            for numbers in (self.low, self.values, self.high)
        )
        return replace(self, values=values, low=low, high=high)

    def thinned(self, grid: Numbers) -> ChartLine:
        """Return a line with the points between two grid steps merged."""
        cells = np.searchsorted(grid, self.steps, side="right")
        starts = np.flatnonzero(np.diff(cells, prepend=-1))
        if len(starts) == len(cells):
            return self
        is_finite = np.isfinite(self.values)
        counts = np.add.reduceat(is_finite.astype(np.float64), starts)
        totals = np.add.reduceat(np.where(is_finite, self.values, 0.0), starts)
        return replace(
            self,
            steps=np.add.reduceat(self.steps, starts) / np.diff(starts, append=len(cells)),
            values=np.divide(totals, counts, out=np.full_like(totals, np.nan), where=counts > 0),
            low=np.fmin.reduceat(self.low, starts),  # fmin and fmax ignore NaN
            high=np.fmax.reduceat(self.high, starts),
            nonfinite=np.add.reduceat(self.nonfinite, starts),
        )

    def smoothed(self, span: float) -> Numbers:
        """Return the exponential moving average of the values at each step.

        Args:
            span: the number of steps in the whole chart.
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


@dataclass(frozen=True, slots=True)
class ChartMark:
    """The step at which work resumed after a restart or a heal; ``color`` is that of the run."""

    at: float
    is_heal: bool = False
    color: int | None = None

    @property
    def kind_color(self) -> str:
        """Green for a heal, orange for a restart."""
        return HEAL if self.is_heal else RESTART


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A metric of ranks or runs, ready to be drawn.

    Attributes:
        lines: the lines of all ranks or of all runs.
        drawn: the lines to draw, strong ones last.
        legend: the legend text of the strong line.
        value: the mean of the newest values of the ranks.
        x_unit: the unit of the horizontal axis: "step", "samples" or "s".
    """

    name: str
    lines: tuple[ChartLine, ...]
    drawn: tuple[ChartLine, ...]
    marks: tuple[ChartMark, ...] = ()
    is_log: bool = False
    legend: str = ""
    value: float | None = None
    x_unit: str = "step"

    @property
    def steps(self) -> tuple[float, float]:
        """The first and the last step."""
        ends = [float(step) for line in self.lines for step in (line.steps[0], line.steps[-1])]
        low, high = (min(ends), max(ends)) if ends else (0.0, 0.0)
        return (0.0 if 0 < low < 0.01 * high else low), high  # the first bucket may begin at 0

    @property
    def span(self) -> float:
        """The number of steps from the first to the last."""
        return self.steps[1] - self.steps[0]

    @property
    def limits(self) -> tuple[float, float] | None:
        """The lowest and the highest drawable value; None if there are none."""
        numbers = _finite(end for line in self.lines for end in (line.low, line.high))
        if self.is_log:
            numbers = numbers[numbers > 0]
        return (float(numbers.min()), float(numbers.max())) if len(numbers) else None

    def curves(self) -> list[ChartLine]:
        """Return the lines to draw, thinned, and as logarithms for a log axis."""
        grid = np.linspace(*self.steps, MAX_POINTS)
        lines = [line.logarithms() for line in self.drawn] if self.is_log else self.drawn
        return [line.thinned(grid) for line in lines]

    @property
    def facts(self) -> list[str]:
        """Notes on the chart: its scale, and the values that it does not show."""
        facts = []
        if self.is_log:
            has_zeros = any((line.low == 0).any() for line in self.lines)
            facts.append("log scale, zeros left out" if has_zeros else "log scale")
        if self.nonfinite:
            labels = [each.label for each in self.lines if each.is_strong and each.nonfinite.any()]
            count = f"{plural(self.nonfinite, 'value')} {self.why_not_drawn}"
            facts.append(f"{count} ({', '.join(labels)})" if labels and not self.legend else count)
        return facts

    @property
    def nonfinite(self) -> int:
        """The number of values that are not finite."""
        return sum(int(line.nonfinite.sum()) for line in self.lines)

    @property
    def why_not_drawn(self) -> str:
        """Why values are not drawn: the newest of them are too large, or they are not finite."""
        last = [line.last for line in self.lines if line.nonfinite.any()]
        is_large = last and all(isfinite(each) and abs(each) >= MAX_FINITE for each in last)
        return "too large to draw" if is_large else "not finite"

    @property
    def text(self) -> str:
        """A description of the chart."""
        if not self.lines:
            return f"{self.name}: no values"
        if self.value is None:
            over = "time" if self.x_unit == "s" else self.x_unit
            return f"{self.name} over {over}: {', '.join(line.key for line in self.lines)}"
        at = f"{self.x_unit} {self.drawn[-1].steps[-1]:.0f}"
        return f"{self.name}: {format_number(self.value)} at {at}, {self.legend}"


def rank_chart(name: str, curves: Mapping[int, Curve], scale: AxisScale = AxisScale.AUTO) -> Chart:
    """Return the chart of a metric: a line for each rank, and a strong line for their mean.

    With more than 8 ranks, draw only the lines with the lowest and the highest newest value, and a
    band around all lines.
    """
    lines = rank_lines(curves)
    marks = {at for curve in curves.values() for at in curve.resume_points}
    drawn, legend = lines, ""
    if len(lines) == 1:
        lines = drawn = [replace(lines[0], is_strong=True)]
        legend = lines[0].label
    elif lines:
        mean = mean_line(lines)
        if len(lines) > MANY_RANKS:
            drawn = [*_extremes(_up_to_date(lines)), mean]
        else:
            drawn = [*lines, replace(mean, low=mean.values, high=mean.values)]
        legend = f"mean of {len(lines)} ranks"
    return Chart(
        name=name,
        lines=tuple(lines),
        drawn=tuple(drawn),
        marks=tuple(ChartMark(at) for at in sorted(marks)),
        is_log=is_log(lines, scale),
        legend=legend,
        value=newest(lines),
    )


def rank_lines(curves: Mapping[int, Curve]) -> list[ChartLine]:
    """Return a line for each curve that has points, ordered by rank."""
    return [
        ChartLine(
            steps=_numbers(curve.steps),
            values=_numbers(curve.mean),
            low=_numbers(curve.low),
            high=_numbers(curve.high),
            nonfinite=_numbers(curve.nonfinite),
            last=curve.last,
            label=f"rank {rank}",
            key=str(rank),
            color=rank,
        )
        for rank, curve in sorted(curves.items())
        if curve.steps
    ]


def is_log(lines: Sequence[ChartLine], scale: AxisScale) -> bool:
    """Return whether the value axis is logarithmic: as the user chose, else if that helps.

    A log axis leaves out zeros, so lines with zeros get one only by the user's choice. Otherwise a
    cell that ran twice, with more values in a bucket, would get another scale than in the panel.
    """
    numbers = _finite(end for line in lines for end in (line.low, line.high))
    if scale is AxisScale.LINEAR or not (numbers > 0).any() or (numbers < 0).any():
        return False
    values = (_finite([line.values]).tolist() for line in lines)
    return scale is AxisScale.LOG or bool(numbers.all() and any(map(wants_log, values)))


def mean_line(lines: Sequence[ChartLine]) -> ChartLine:
    """Return the mean of ranks, with a band from the lowest to the highest value.

    The line ends at the step of the slowest rank, or its end would flicker. Ranks that are far
    behind do not count.
    """
    steps = np.unique(np.concatenate([line.steps for line in lines]))
    steps = steps[steps <= min(line.steps[-1] for line in _up_to_date(lines))]
    steps = steps[:: ceil(len(steps) / MAX_STEPS)]
    totals, counts = np.zeros_like(steps), np.zeros_like(steps)
    for line in lines:
        in_range = (steps >= line.steps[0]) & (steps <= line.steps[-1])
        totals[in_range] += np.interp(steps[in_range], line.steps, line.values)
        counts += in_range
    is_known = counts > 0  # False where steps are so large that floats no longer ascend
    steps, means = steps[is_known], totals[is_known] / counts[is_known]
    grid = np.linspace(steps[0], steps[-1], MAX_POINTS)
    low, high = np.full(MAX_POINTS + 1, np.nan), np.full(MAX_POINTS + 1, np.nan)
    nonfinite = np.zeros_like(steps)
    for line in lines:
        cells = np.searchsorted(grid, line.steps, side="right")
        np.fmin.at(low, cells, line.low)
        np.fmax.at(high, cells, line.high)
        nearest = np.searchsorted(steps, line.steps).clip(0, len(steps) - 1)
        np.add.at(nonfinite, nearest, line.nonfinite)
    at = np.searchsorted(grid, steps, side="right")
    band, last = (low[at], high[at]), float(means[-1])
    return ChartLine(steps, means, *band, nonfinite, last, label="mean", is_strong=True)


def newest(lines: Sequence[ChartLine]) -> float | None:
    """Return the mean of the newest values; None if there are no lines."""
    values = [line.last for line in _up_to_date(lines)]
    return sum(values) / len(values) if values else None


def slices(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the slices in which a mask is true, as pairs of start and end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def _up_to_date(lines: Sequence[ChartLine]) -> list[ChartLine]:
    """Return the lines that are not far behind, unlike the line of a dead rank."""
    if not lines:
        return []
    last = max(line.steps[-1] for line in lines)
    span = last - min(line.steps[0] for line in lines)
    return [line for line in lines if last - line.steps[-1] <= MAX_LAG * span]


def _extremes(lines: Sequence[ChartLine]) -> list[ChartLine]:
    ends = sorted((line for line in lines if isfinite(line.last)), key=attrgetter("last"))
    return [ends[0], ends[-1]] if len(ends) > 1 else ends


def _numbers(field: Sequence[float]) -> Numbers:
    return np.array(field, dtype=np.float64)


def _finite(parts: Iterable[Numbers]) -> Numbers:
    numbers = np.concatenate([*parts, np.empty(0)])
    return np.asarray(numbers[np.isfinite(numbers)], dtype=np.float64)
