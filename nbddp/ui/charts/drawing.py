"""The chart of one metric: a faint line for each rank, a strong one for their mean.

It is drawn on a sheet, which may become SVG or PNG; any thread may draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from nbddp.charts.palette import rank_class, rank_color
from nbddp.errors import say_ranks
from nbddp.formatting import plural
from nbddp.record.metrics import Curve
from nbddp.ui.charts.frame import DIGIT, SMALL, WIDTH, Frame, Scale
from nbddp.ui.charts.lines import Line, lines_of, mean, newest, runs, spread
from nbddp.ui.charts.outliers import outliers
from nbddp.ui.charts.scale import say_number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

INK = "#7b7b7b"  # has the same contrast to white as to #111
ALERT = "#dd4444"
RESTART = "#d9822b"
FINE, COARSE = 180, 160  # points of a thin line, and of a strong one
POINTS = 8 * FINE  # of all thin lines together: many ranks have shorter ones
MAX_DOTS = 25  # a line of more points goes without
MANY_RANKS = 8
VERY_MANY = 16  # ranks; of more only those have a line that stand apart


class Sheet(Protocol):
    """What a chart is drawn on, measured in CSS pixels from its lower left corner."""

    def line(
        self, xs: Numbers, ys: Numbers, *, color: str = INK, width: float, alpha: float = 1.0
    ) -> None:
        """Draw a line, with a gap where a number is NaN."""

    def dots(self, xs: Numbers, ys: Numbers, *, color: str) -> None:
        """Draw a dot at each place."""

    def shapes(self, corners: Sequence[Numbers], *, color: str, alpha: float) -> None:
        """Fill shapes, each given by rows of x and y."""

    def text(
        self, x: float, y: float, text: str, *, align: Literal["left", "center", "right"] = "left"
    ) -> None:
        """Write a few letters."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """What is drawn within it can be told apart from the rest."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A metric, ready to be drawn.

    Attributes:
        thin: of several ranks, those that have a line of their own.
        strong: the mean of the ranks, or the line of a single one; None if there are no points.
        value: the newest, as a mean of the ranks.
    """

    name: str
    lines: Mapping[int, Line]
    thin: Mapping[int, Line]
    frame: Frame
    strong: Line | None
    value: float | None

    @classmethod
    def of(cls, name: str, curves: Mapping[int, Curve], scale: Scale = Scale.AUTO) -> Chart:
        """From the curves of a metric, which are given by rank."""
        lines = lines_of(curves)
        known = list(lines.values())
        strong = (known[0] if len(known) == 1 else mean(known)) if known else None
        thin = outliers(lines) if len(lines) > VERY_MANY else lines
        return cls(name, lines, thin, Frame(known, scale), strong, newest(known))

    @property
    def color(self) -> str:
        """Of the strong line."""
        return rank_color(next(iter(self.lines))) if len(self.lines) == 1 else INK

    @property
    def said_value(self) -> str:
        """The newest value in a few characters."""
        return "" if self.value is None else say_number(self.value)

    @property
    def said_lines(self) -> str:
        """What the strong line is."""
        if len(self.lines) == 1:
            return say_ranks(list(self.lines))
        return f"mean of {len(self.lines)} ranks" if self.lines else ""

    @property
    def facts(self) -> list[str]:
        """What has to be said of the picture: its scale, and what is not in it."""
        lost = self.frame.lost
        said = f"{plural(lost, 'value')} not finite" if lost else ""
        return [*filter(None, ["log scale" if self.frame.is_log else "", said])]


def draw(sheet: Sheet, chart: Chart) -> None:
    """Draw all that is inside and beside the axes.

    The mean is over the ranks that have values at a step. Values that are not finite are gaps with
    a red mark on top. Where there are more values than pixels, a line is the mean of neighbours,
    and a band goes from the lowest to the highest; of more than 8 ranks there is one band for all.
    Of more than 16 only those have a line that stand apart, and the band is around the others.
    An orange mark is where another attempt resumed the work.
    """
    frame, lines = chart.frame, chart.lines
    draw_axes(sheet, frame)
    _draw_marks(sheet, frame)
    draw_lost(sheet, frame, list(lines.values()))
    if chart.strong is None:
        return
    strong = chart.strong.thinned(frame.grid(COARSE))
    if len(lines) == 1:
        draw_band(sheet, frame, strong, chart.color)
    else:
        _draw_ranks(sheet, frame, chart)
    with sheet.part("mean"):
        _draw_strong(sheet, frame, strong, chart.color)
    with sheet.part("smooth"):
        smooth = strong.smoothed(frame.span)
        sheet.line(frame.across(strong.steps), frame.up(smooth), color=chart.color, width=2.2)


def draw_axes(sheet: Sheet, frame: Frame) -> None:
    """The lines and numbers that values and steps are read by."""
    ends = np.array([frame.left, frame.right])
    for value, text in frame.y_ticks:
        y = frame.up(np.array([value, value]))
        sheet.line(ends, y, width=0.7, alpha=0.3)
        sheet.text(frame.left - 6, y[0] - 3.6, text, align="right")
    sheet.line(ends, np.full(2, frame.bottom), width=1.0, alpha=0.7)
    for step, text in frame.x_ticks:
        x = frame.across(np.array([step, step]))
        sheet.line(x, np.array([frame.bottom - 3, frame.bottom]), width=1.0, alpha=0.7)
        furthest = WIDTH - 2 - SMALL * DIGIT * len(text) / 2
        sheet.text(min(x[0], furthest), 9, text, align="center")
    if frame.x_ticks:
        first, text = frame.x_ticks[0]
        [x] = frame.across(np.array([first]))
        free = min(frame.left - 6, x - SMALL * DIGIT * len(text) / 2 - 4)
        sheet.text(free, 9, frame.unit, align="right")


def _draw_marks(sheet: Sheet, frame: Frame) -> None:
    """Mark where another attempt resumed the work."""
    heights = np.array([frame.bottom, frame.top])
    for at in frame.restarts:
        [x] = frame.across(np.array([at]))
        sheet.line(np.full(2, x), heights, color=RESTART, width=1.4, alpha=0.9)
        y = frame.top + 5
        foot = np.array([[x - 4, y], [x + 4, y], [x, y - 6]])
        sheet.shapes([foot], color=RESTART, alpha=1.0)


def draw_lost(sheet: Sheet, frame: Frame, lines: Sequence[Line]) -> None:
    """Mark where values were not finite."""
    if not frame.lost:
        return
    is_marked = np.zeros(WIDTH * 2, dtype=np.bool_)  # two for each pixel
    for line in lines:
        xs = frame.across(line.steps)
        for a, b in runs(line.lost > 0):
            is_marked[round((xs[a] - 1) * 2) : round((xs[b - 1] + 1) * 2)] = True
    spans = [(a / 2, b / 2) for a, b in runs(is_marked)]
    sheet.shapes([_box(*span, frame.bottom, frame.top) for span in spans], color=ALERT, alpha=0.13)
    sheet.shapes([_box(*span, frame.top, frame.top + 5) for span in spans], color=ALERT, alpha=1.0)


def _box(left: float, right: float, bottom: float, top: float) -> Numbers:
    return np.array([[left, bottom], [right, bottom], [right, top], [left, top]])


def _draw_ranks(sheet: Sheet, frame: Frame, chart: Chart) -> None:
    is_many = len(chart.lines) > MANY_RANKS
    is_very_many = len(chart.lines) > VERY_MANY
    if is_many:
        draw_band(sheet, frame, spread(_in_band(chart), frame.grid(COARSE)), INK)
    grid = frame.grid(min(FINE, POINTS // max(1, len(chart.thin))))
    width, alpha = (1.2, 0.9) if is_very_many else (0.9, 0.3 if is_many else 0.6)
    for rank, line in chart.thin.items():
        thin, color = line.thinned(grid), rank_color(rank)
        with sheet.part(f"rank k{rank} {rank_class(rank)}"):
            if not is_many:
                draw_band(sheet, frame, thin, color)
            xs, ys = frame.across(thin.steps), frame.up(thin.values)
            sheet.line(xs, ys, color=color, width=width, alpha=alpha)


def _in_band(chart: Chart) -> list[Line]:
    is_very_many = len(chart.lines) > VERY_MANY
    return [
        line for rank, line in chart.lines.items() if not is_very_many or rank not in chart.thin
    ]


def draw_band(sheet: Sheet, frame: Frame, line: Line, color: str) -> None:
    """From the lowest to the highest value of points that were put together."""
    if not (line.low < line.high).any():
        return
    xs = frame.across(line.steps)
    floor = np.column_stack([xs, frame.up(line.low)])
    roof = np.column_stack([xs, frame.up(line.high)])
    shapes = [np.concatenate([floor[a:b], roof[a:b][::-1]]) for a, b in runs(np.isfinite(line.low))]
    sheet.shapes(shapes, color=color, alpha=0.18)


def _draw_strong(sheet: Sheet, frame: Frame, line: Line, color: str) -> None:
    xs, ys = frame.across(line.steps), frame.up(line.values)
    sheet.line(xs, ys, color=color, width=1.8)
    is_there = np.isfinite(ys)
    has_left, has_right = np.roll(is_there, 1), np.roll(is_there, -1)
    has_left[0] = has_right[-1] = False
    shown = is_there if is_there.sum() <= MAX_DOTS else is_there & ~has_left & ~has_right
    sheet.dots(xs[shown], ys[shown], color=color)
