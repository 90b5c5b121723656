"""The chart of one metric, as a PNG: a faint line for each rank, a strong one for their mean.

Importing this loads matplotlib, so import it when there is something to draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from typing import TYPE_CHECKING

import numpy as np

from nbddp.record.series import Curve
from nbddp.ui.palette import rank_color
from nbddp.ui.panel.paper import (
    BOLD,
    DIGIT,
    HEIGHT,
    INK,
    LARGE,
    SCALE,
    SMALL,
    WIDTH,
    Paper,
    readable,
)
from nbddp.ui.panel.scale import (
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

ALERT = "#dd4444"
RESTART = "#d9822b"
FINE, COARSE = 320, 160  # points of a thin line, and of a strong one
MAX_STEPS = 2000  # that a mean is taken at
MAX_DOTS = 25  # a line of more points goes without
MANY_RANKS = 8
MAX_BEGINS = 16  # marks where a loop was begun again; more would be a fence
LAG = 0.05  # of the steps: a rank that is further behind is not waited for


def draw(name: str, curves: Mapping[int, Curve]) -> bytes:
    """Draw a metric's curves, which are given by rank; any thread may do this.

    The mean is over the ranks that have values at a step. Values that are not finite are gaps with
    a red mark on top, and are counted in words. Where values of many magnitudes would otherwise
    lie on one another, the scale is logarithmic, and says so. Where there are more values than
    pixels, a line is the mean of neighbours, and a band goes from the lowest to the highest. Where
    a loop was begun again is a grey mark, where another attempt took the work up an orange one.
    """
    lines = {rank: _Line.of(curve) for rank, curve in sorted(curves.items()) if curve.steps}
    known = list(lines.values())
    frame, paper = _Frame(known), Paper()
    _draw_axes(paper, frame)
    _draw_marks(paper, frame)
    _draw_lost(paper, frame, known)
    if len(lines) == 1:
        [(rank, line)] = lines.items()
        _draw_band(paper, frame, line.thinned(frame.grid(COARSE)), rank_color(rank))
        _draw_strong(paper, frame, line, rank_color(rank))
    elif lines:
        _draw_ranks(paper, frame, lines)
        _draw_strong(paper, frame, _mean(known), INK)
    _draw_title(paper, name, _newest(known), is_log=frame.is_log)
    return paper.png()


# ---- the numbers


@dataclass(frozen=True, slots=True)
class _Line:
    """A curve, as arrays."""

    steps: Numbers
    values: Numbers
    low: Numbers
    high: Numbers
    lost: Numbers
    last: float
    begins: tuple[float, ...] = ()
    falls: int = 0
    restarts: tuple[float, ...] = ()

    @classmethod
    def of(cls, curve: Curve) -> _Line:
        fields = (curve.steps, curve.values, curve.low, curve.high, curve.lost)
        steps, values, low, high, lost = (np.array(field, dtype=np.float64) for field in fields)
        begins = curve.begins if curve.falls <= MAX_BEGINS else ()
        marks = begins, curve.falls, curve.restarts
        return cls(steps, values, low, high, lost, curve.last, *marks)

    def thinned(self, grid: Numbers) -> _Line:
        """With the points put together that lie between two steps of a grid."""
        cells = np.searchsorted(grid, self.steps, side="right")
        starts = np.flatnonzero(np.diff(cells, prepend=-1))
        if len(starts) == len(cells):
            return self
        is_there = np.isfinite(self.values)
        counts = np.add.reduceat(is_there.astype(np.float64), starts)
        totals = np.add.reduceat(np.where(is_there, self.values, 0.0), starts)
        return _Line(
            np.add.reduceat(self.steps, starts) / np.diff(starts, append=len(cells)),
            np.divide(totals, counts, out=np.full_like(totals, np.nan), where=counts > 0),
            np.fmin.reduceat(self.low, starts),  # these two pass over NaN
            np.fmax.reduceat(self.high, starts),
            np.add.reduceat(self.lost, starts),
            self.last,
        )


def _current(lines: Sequence[_Line]) -> list[_Line]:
    """Those that go on: not of a rank that was lost long ago."""
    if not lines:
        return []
    newest = max(line.steps[-1] for line in lines)
    span = newest - min(line.steps[0] for line in lines)
    return [line for line in lines if newest - line.steps[-1] <= LAG * span]


def _mean(lines: Sequence[_Line]) -> _Line:
    """The mean over ranks, as far as all have come that go on: else its end would be restless."""
    steps = np.unique(np.concatenate([line.steps for line in lines]))
    steps = steps[steps <= min(line.steps[-1] for line in _current(lines))]
    steps = steps[:: ceil(len(steps) / MAX_STEPS)]
    totals, counts = np.zeros_like(steps), np.zeros_like(steps)
    for line in lines:
        here = (steps >= line.steps[0]) & (steps <= line.steps[-1])
        totals[here] += np.interp(steps[here], line.steps, line.values)
        counts += here
    means = totals / counts  # a step is one of some rank: no count is zero
    return _Line(steps, means, means, means, np.zeros_like(steps), means[-1])


def _newest(lines: Sequence[_Line]) -> float | None:
    """The mean of the newest values, None if there are none."""
    values = [line.last for line in _current(lines)]
    return sum(values) / len(values) if values else None


def _finite(parts: Sequence[Numbers]) -> list[float]:
    numbers = np.concatenate([*parts, np.empty(0)])
    return list(numbers[np.isfinite(numbers)].tolist())


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where it is true, as beginnings and ends of slices."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


class _Frame:
    """Where steps and values are on the paper, and what stands beside the axes."""

    def __init__(self, lines: Sequence[_Line]) -> None:
        self.lost = sum(int(line.lost.sum()) for line in lines)
        ends = _finite([end for line in lines for end in (line.low, line.high)])
        is_positive = bool(ends) and min(ends) > 0
        self.is_log = is_positive and any(wants_log(_finite([line.values])) for line in lines)
        limits = np.array([min(ends), max(ends)]) if ends else np.array([0.0, 1.0])
        self._y = padded(*self._heights(limits).tolist()) if ends else (0.0, 1.0)
        steps = [float(step) for line in lines for step in (line.steps[0], line.steps[-1])]
        self._x = (min(steps), max(steps)) if steps else (0.0, 0.0)
        if 0 < self._x[0] < 0.01 * self._x[1]:  # the middle of a first bucket that begins at 0
            self._x = (0.0, self._x[1])
        self.x_ticks = self._step_ticks() if steps else []
        self.y_ticks = self._value_ticks() if ends else []
        widest = max((len(text) for _, text in self.y_ticks), default=0)
        self.left = 14 + SMALL * DIGIT * max(4, widest)
        self.is_counted = any(line.falls for line in lines)
        self.begins = sorted({at for line in lines for at in line.begins})
        self.restarts = sorted({at for line in lines for at in line.restarts})
        self.right, self.bottom = WIDTH - 8.0, 24.0
        self.top = HEIGHT - (46.0 if self.lost else 30.0)

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

    def _step_ticks(self) -> list[tuple[float, str]]:
        texts: list[str] = []
        ticks: list[float] = []
        for at_most in (6, 4, 2):
            ticks = step_ticks(*self._x, at_most=at_most)
            texts = say_ticks(ticks)
            if sum(len(text) + 2 for text in texts) * SMALL * DIGIT < WIDTH - 50:
                break
        return list(zip(ticks, texts, strict=True))

    def _value_ticks(self) -> list[tuple[float, str]]:
        if self.is_log:
            return [(tick, say_number(tick)) for tick in log_ticks(*self._y)]
        ticks = value_ticks(*self._y)
        return list(zip(ticks, say_ticks(ticks), strict=True))


# ---- the picture


def _draw_axes(paper: Paper, frame: _Frame) -> None:
    ends = np.array([frame.left, frame.right])
    for value, text in frame.y_ticks:
        y = frame.up(np.array([value, value]))
        paper.line(ends, y, width=0.7, alpha=0.3)
        paper.text(frame.left - 6, y[0] - 3.6, text, align="right")
    paper.line(ends, np.full(2, frame.bottom), width=1.0, alpha=0.7)
    for step, text in frame.x_ticks:
        x = frame.across(np.array([step, step]))
        paper.line(x, np.array([frame.bottom - 3, frame.bottom]), width=1.0, alpha=0.7)
        furthest = WIDTH - 2 - SMALL * DIGIT * len(text) / 2
        paper.text(min(x[0], furthest), 9, text, align="center")
    if frame.x_ticks:
        paper.text(frame.left - 6, 9, "count" if frame.is_counted else "step", align="right")


def _draw_marks(paper: Paper, frame: _Frame) -> None:
    """Mark where a loop was begun again, and where an attempt took it up."""
    dashes = np.arange(frame.bottom, frame.top, 3.0)
    dashes[2::3] = np.nan
    for at in frame.begins:
        paper.line(frame.across(np.full_like(dashes, at)), dashes, width=1.0, alpha=0.8)
    heights = np.array([frame.bottom, frame.top])
    for at in frame.restarts:
        [x] = frame.across(np.array([at]))
        paper.line(np.full(2, x), heights, color=RESTART, width=1.4, alpha=0.9)
        y = frame.top + 5
        foot = np.array([[x - 4, y], [x + 4, y], [x, y - 6]])
        paper.shapes([foot], color=RESTART, alpha=1.0)


def _draw_lost(paper: Paper, frame: _Frame, lines: Sequence[_Line]) -> None:
    """Mark where values were not finite, and say how many."""
    if not frame.lost:
        return
    is_marked = np.zeros(WIDTH * SCALE, dtype=np.bool_)
    for line in lines:
        xs = frame.across(line.steps)
        for a, b in _runs(line.lost > 0):
            is_marked[round((xs[a] - 1) * SCALE) : round((xs[b - 1] + 1) * SCALE)] = True
    spans = [(a / SCALE, b / SCALE) for a, b in _runs(is_marked)]
    paper.shapes([_box(*span, frame.bottom, frame.top) for span in spans], color=ALERT, alpha=0.13)
    paper.shapes([_box(*span, frame.top, frame.top + 5) for span in spans], color=ALERT, alpha=1.0)
    text = f"{frame.lost} value{'' if frame.lost == 1 else 's'} not finite"
    paper.text(frame.right, frame.top + 9, text, align="right", color=ALERT)


def _box(left: float, right: float, bottom: float, top: float) -> Numbers:
    return np.array([[left, bottom], [right, bottom], [right, top], [left, top]])


def _draw_ranks(paper: Paper, frame: _Frame, lines: Mapping[int, _Line]) -> None:
    grid = frame.grid(FINE)
    thinned = [(rank_color(rank), line.thinned(grid)) for rank, line in lines.items()]
    for color, line in thinned:
        _draw_band(paper, frame, line, color)
    alpha = 0.6 if len(lines) <= MANY_RANKS else 0.3
    for color, line in thinned:
        xs, ys = frame.across(line.steps), frame.up(line.values)
        paper.line(xs, ys, color=color, width=0.9, alpha=alpha)


def _draw_band(paper: Paper, frame: _Frame, line: _Line, color: str) -> None:
    """From the lowest to the highest value of points that were put together."""
    if not (line.low < line.high).any():
        return
    xs = frame.across(line.steps)
    floor = np.column_stack([xs, frame.up(line.low)])
    roof = np.column_stack([xs, frame.up(line.high)])
    runs = _runs(np.isfinite(line.low))
    shapes = [np.concatenate([floor[a:b], roof[a:b][::-1]]) for a, b in runs]
    paper.shapes(shapes, color=color, alpha=0.18)


def _draw_strong(paper: Paper, frame: _Frame, line: _Line, color: str) -> None:
    line = line.thinned(frame.grid(COARSE))
    xs, ys = frame.across(line.steps), frame.up(line.values)
    paper.line(xs, ys, color=color, width=1.8)
    is_there = np.isfinite(ys)
    has_left, has_right = np.roll(is_there, 1), np.roll(is_there, -1)
    has_left[0] = has_right[-1] = False
    shown = is_there if is_there.sum() <= MAX_DOTS else is_there & ~has_left & ~has_right
    paper.dots(xs[shown], ys[shown], color=color)


def _draw_title(paper: Paper, name: str, value: float | None, *, is_log: bool) -> None:
    x, y, gap = 8.0, HEIGHT - 17.0, 7.0
    if is_log:
        paper.text(WIDTH - x, y, "log", align="right")
    number = "" if value is None else say_number(value)
    taken = paper.width_of(number, size=LARGE, font=BOLD) + (30 if is_log else 0)
    text, room = readable(name), WIDTH - 2 * x - gap - taken
    while (width := paper.width_of(text, size=LARGE)) > room:
        keep = min(len(text) - 2, int(len(text) * room / width))
        text = text[:keep] + "…"
    paper.text(x, y, text, size=LARGE)
    color = INK if value is None or isfinite(value) else ALERT
    paper.text(x + width + gap, y, number, size=LARGE, font=BOLD, color=color)
