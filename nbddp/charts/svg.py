"""Draw a chart as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Literal

import numpy as np

from nbddp.charts.axes import format_number, format_ticks, log_ticks, padded, round_ticks
from nbddp.charts.chart_lines import Chart, ChartLine, ChartMark, Numbers, slices
from nbddp.charts.palette import ALERT, INK, rank_class, rank_color

WIDTH, HEIGHT = 360, 190  # CSS pixels, before a page scales the chart
FONT_SIZE = 10.0  # of the ticks
DIGIT_WIDTH = 0.64  # as a multiple of the font size
INSET = 3.0  # keeps the first and the last dot inside the axes

Align = Literal["center", "right"]
_ANCHORS = {"center": "middle", "right": "end"}
_BOX = f'viewBox="0 0 {WIDTH * 10} {HEIGHT * 10}"'


class Frame:
    """The area inside the axes of a chart, in CSS pixels from the lower left corner."""

    def __init__(self, chart: Chart) -> None:
        self._steps = chart.steps
        ends = np.array(chart.limits or (0.0, 1.0))
        low, high = (np.log10(ends) if chart.is_log else ends).tolist()
        self._heights = padded(low, high) if chart.limits else (low, high)
        self.x_unit = chart.x_unit
        self.x_ticks = self._step_ticks() if chart.lines else []
        self.y_ticks: list[tuple[float, str]] = []
        if chart.limits and chart.is_log:
            ticks = log_ticks(*self._heights)
            self.y_ticks = [(float(np.log10(tick)), format_number(tick)) for tick in ticks]
        elif chart.limits:
            ticks = round_ticks(*self._heights)
            self.y_ticks = list(zip(ticks, format_ticks(ticks), strict=True))
        letters = [len(text) for _, text in self.y_ticks]
        self.left = 14 + FONT_SIZE * DIGIT_WIDTH * max([4, len(self.x_unit) - 2, *letters])
        self.right, self.bottom, self.top = WIDTH - 8.0, 24.0, HEIGHT - 12.0

    def x_pixels(self, steps: Numbers) -> Numbers:
        """Return the horizontal positions of steps."""
        low, high = self._steps
        if low == high:
            return np.full_like(steps, (self.left + self.right) / 2)
        width = self.right - self.left - 2 * INSET
        return self.left + INSET + (steps - low) / (high - low) * width

    def y_pixels(self, heights: Numbers) -> Numbers:
        """Return the vertical positions of values, or of logarithms on a log axis."""
        low, high = self._heights
        return self.bottom + (heights - low) / (high - low) * (self.top - self.bottom)

    def _step_ticks(self) -> list[tuple[float, str]]:
        least = 0.0 if self.x_unit == "s" else 1.0
        for at_most in (6, 4, 2):
            ticks = round_ticks(*self._steps, at_most=at_most, least=least)
            texts = format_ticks(ticks)
            if sum(len(text) + 2 for text in texts) * FONT_SIZE * DIGIT_WIDTH < WIDTH - 50:
                break
        return list(zip(ticks, texts, strict=True))


@dataclass(frozen=True, slots=True)
class Label:
    """The text of a tick; ``y`` is the distance of its baseline from the upper edge."""

    x: float
    y: float
    text: str
    align: Align


class SvgCanvas:
    """Collects shapes. The file has ten units a pixel, so that all numbers are whole.

    Attributes:
        labels: the texts. They are separate from the shapes, because pages that remove SVG tags
            keep the text in them.
    """

    def __init__(self) -> None:
        self.labels: list[Label] = []
        self._parts: list[str] = []

    def line(
        self, xs: Numbers, ys: Numbers, *, color: str = INK, width: float, alpha: float = 1.0
    ) -> None:
        """Draw a line, with a gap where a number is NaN."""
        if path := _path(xs, ys):
            self._parts.append(
                f'<path d="{path}" fill="none" stroke={_color_attributes(color, alpha)}'
                f' stroke-width="{width * 10:g}" stroke-linejoin="round"/>'
            )

    def dots(self, xs: Numbers, ys: Numbers, *, color: str) -> None:
        places = zip((xs * 10).tolist(), ((HEIGHT - ys) * 10).tolist(), strict=True)
        dots = "".join(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="22"/>' for x, y in places)
        if dots:
            self._parts.append(f"<g fill={_color_attributes(color)}>{dots}</g>")

    def shapes(self, corners: Sequence[Numbers], *, color: str, alpha: float = 1.0) -> None:
        """Fill shapes; each is an array with a row of x and y for each corner."""
        path = "".join(f"{_path(each[:, 0], each[:, 1])}z" for each in corners)
        if path:
            self._parts.append(f'<path d="{path}" fill={_color_attributes(color, alpha)}/>')

    def text(self, x: float, y: float, text: str, align: Align) -> None:
        """Add a label."""
        self.labels.append(Label(x, HEIGHT - y, text, align))

    @contextmanager
    def part(self, name: str, color: int | None = None) -> Iterator[None]:
        """Group all shapes drawn in this block, with the CSS class of a palette colour."""
        classes = "" if color is None else f" {rank_class(color)}"
        self._parts.append(f'<g class="nbddp-{name}{classes}">')
        yield
        self._parts.append("</g>")

    def inline(self, label: str) -> str:
        """Return an SVG element without labels, as wide as its parent.

        ``label`` is the description for screen readers. It must be escaped already.
        """
        return f'<svg {_BOX} role="img" aria-label="{label}">{"".join(self._parts)}</svg>'

    def picture(self) -> str:
        """Return an SVG file with labels, in colours for light and dark pages."""
        written = "".join(
            f'<text x="{label.x * 10:.0f}" y="{label.y * 10:.0f}"'
            f' text-anchor="{_ANCHORS[label.align]}">{escape(label.text)}</text>'
            for label in self.labels
        )
        body = "".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" {_BOX}'
            f' color="{INK}"><style>.nbddp-smooth{{display:none}}</style>{body}'
            f'<g fill="{INK}" font-family="system-ui,sans-serif" font-size="{FONT_SIZE * 10:g}">'
            f"{written}</g></svg>"
        )


def draw(chart: Chart, frame: Frame) -> SvgCanvas:
    """Draw axes, lines and marks.

    A value that is not finite becomes a gap with a red mark above. A point that merges several
    values has a band from the lowest to the highest. An orange mark is a restart, a green mark is a
    heal. Smooth lines are included, and the page shows them on demand.
    """
    canvas = SvgCanvas()
    _draw_axes(canvas, frame)
    for mark in chart.marks:
        _draw_mark(canvas, frame, mark)
    _draw_nonfinite(canvas, frame, chart.lines)
    curves = chart.curves()
    for line in curves:
        with canvas.part("curve", line.color):
            _draw_line(canvas, frame, line)
    for line in curves:
        if line.is_strong:
            xs, ys = frame.x_pixels(line.steps), frame.y_pixels(line.smoothed(chart.span))
            with canvas.part("smooth", line.color):
                canvas.line(xs, ys, color=line.css_color, width=2.2)
    return canvas


def _draw_axes(canvas: SvgCanvas, frame: Frame) -> None:
    ends = np.array([frame.left, frame.right])
    for height, text in frame.y_ticks:
        y = frame.y_pixels(np.array([height, height]))
        canvas.line(ends, y, width=0.7, alpha=0.3)
        canvas.text(frame.left - 6, y[0] - 3.6, text, "right")
    canvas.line(ends, np.full(2, frame.bottom), width=1.0, alpha=0.7)
    for step, text in frame.x_ticks:
        x = frame.x_pixels(np.array([step, step]))
        canvas.line(x, np.array([frame.bottom - 3, frame.bottom]), width=1.0, alpha=0.7)
        furthest = WIDTH - 2 - FONT_SIZE * DIGIT_WIDTH * len(text) / 2
        canvas.text(min(x[0], furthest), 9, text, "center")
    if frame.x_ticks:
        first, text = frame.x_ticks[0]
        [x] = frame.x_pixels(np.array([first]))
        free = min(frame.left - 6, x - FONT_SIZE * DIGIT_WIDTH * len(text) / 2 - 4)
        canvas.text(free, 9, frame.x_unit, "right")


def _draw_mark(canvas: SvgCanvas, frame: Frame, mark: ChartMark) -> None:
    [x] = frame.x_pixels(np.array([mark.at]))
    if not frame.left <= x <= frame.right:
        return
    heights, color = np.array([frame.bottom, frame.top]), mark.kind_color
    canvas.line(np.full(2, x), heights, color=color, width=1.4, alpha=0.9)
    y = frame.top + 5
    canvas.shapes([np.array([[x - 4, y], [x + 4, y], [x, y - 6]])], color=color)
    if mark.color is not None:
        with canvas.part("curve", mark.color):
            box = _box(x - 3, x + 3, y + 1, y + 4)
            canvas.shapes([box], color=rank_color(mark.color))


def _draw_nonfinite(canvas: SvgCanvas, frame: Frame, lines: Sequence[ChartLine]) -> None:
    is_marked = np.zeros(WIDTH * 2, dtype=np.bool_)  # two entries for each pixel
    for line in lines:
        xs = frame.x_pixels(line.steps)
        for a, b in slices(line.nonfinite > 0):
            is_marked[round((xs[a] - 1) * 2) : round((xs[b - 1] + 1) * 2)] = True
    spans = [(a / 2, b / 2) for a, b in slices(is_marked)]
    bottom, top = frame.bottom, frame.top
    canvas.shapes([_box(*span, bottom, top) for span in spans], color=ALERT, alpha=0.13)
    canvas.shapes([_box(*span, top, top + 5) for span in spans], color=ALERT)


def _draw_line(canvas: SvgCanvas, frame: Frame, line: ChartLine) -> None:
    xs, ys = frame.x_pixels(line.steps), frame.y_pixels(line.values)
    color = line.css_color
    if line.has_band:
        floor = np.column_stack([xs, frame.y_pixels(line.low)])
        roof = np.column_stack([xs, frame.y_pixels(line.high)])
        known = slices(np.isfinite(line.low) & np.isfinite(line.high))
        shapes = [np.concatenate([floor[a:b], roof[a:b][::-1]]) for a, b in known]
        canvas.shapes(shapes, color=color, alpha=0.18)
    if line.is_strong:
        canvas.line(xs, ys, color=color, width=1.8)
        canvas.dots(xs[line.dots], ys[line.dots], color=color)
    else:
        canvas.line(xs, ys, color=color, width=0.9, alpha=0.6)


def _box(left: float, right: float, bottom: float, top: float) -> Numbers:
    return np.array([[left, bottom], [right, bottom], [right, top], [left, top]])


def _color_attributes(color: str, alpha: float = 1.0) -> str:
    """Return the quoted colour, and an attribute for the opacity if needed."""
    shown = "currentColor" if color == INK else color
    return f'"{shown}"' if alpha == 1.0 else f'"{shown}" opacity="{alpha:g}"'


def _path(xs: Numbers, ys: Numbers) -> str:
    """Return an SVG path through the points, in relative coordinates."""
    is_finite = np.isfinite(xs) & np.isfinite(ys)
    pixels = np.column_stack([xs, HEIGHT - ys]) * 10
    parts: list[str] = []
    for a, b in slices(is_finite):
        points = np.rint(pixels[a:b]).astype(np.int64)
        (x, y), *_ = points.tolist()
        moves = " ".join([f"{dx} {dy}" for dx, dy in np.diff(points, axis=0).tolist()])
        parts.append(f"M{x} {y}l{moves}" if moves else f"M{x} {y}")
    return "".join(parts)
