"""Draw a chart as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from nbddp.charts.axes import format_number, format_ticks, log_ticks, padded, round_ticks
from nbddp.charts.chart_lines import Chart, ChartLine, ChartMark, Numbers, slices
from nbddp.charts.palette import ALERT, INK, rank_class, rank_color

WIDTH, HEIGHT = 360, 190  # CSS pixels, before a page scales the chart
FONT_SIZE = 10.0  # of the ticks
DIGIT_WIDTH = 0.64  # as a multiple of the font size
INSET = 3.0  # keeps the first and the last dot inside the axes

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
    """The text of a tick.

    Attributes:
        y: the distance of its baseline from the upper edge.
        anchor: the part of the text at ``x``: "middle" or "end".
    """

    x: float
    y: float
    text: str
    anchor: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """The shapes of a chart. The file has ten units a pixel, so that all numbers are whole.

    Attributes:
        labels: the texts. They are separate from the shapes, because pages that remove SVG tags
            keep the text in them.
    """

    shapes: str
    labels: Sequence[Label]

    def inline(self, label: str) -> str:
        """Return an SVG element without labels, as wide as its parent.

        ``label`` is the description for screen readers. It must be escaped already.
        """
        return f'<svg {_BOX} role="img" aria-label="{label}">{self.shapes}</svg>'

    def picture(self) -> str:
        """Return an SVG file with labels, in colours for light and dark pages."""
        written = "".join(
            f'<text x="{label.x * 10:.0f}" y="{label.y * 10:.0f}"'
            f' text-anchor="{label.anchor}">{escape(label.text)}</text>'
            for label in self.labels
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" {_BOX}'
            f' color="{INK}"><style>.nbddp-smooth{{display:none}}</style>{self.shapes}'
            f'<g fill="{INK}" font-family="system-ui,sans-serif" font-size="{FONT_SIZE * 10:g}">'
            f"{written}</g></svg>"
        )


def draw(chart: Chart, frame: Frame) -> Drawing:
    """Draw axes, lines and marks.

    A value that is not finite becomes a gap with a red mark above. A point that merges several
    values has a band from the lowest to the highest. An orange mark is a restart, a green mark is a
    heal. Smooth lines are included, and the page shows them on demand.
    """
    shapes = [*_axes(frame), *(_mark(frame, mark) for mark in chart.marks)]
    shapes.append(_nonfinite(frame, chart.lines))
    curves = chart.curves()
    shapes += [_group("curve", line.color, _curve(frame, line)) for line in curves]
    for line in curves:
        if line.is_strong:
            xs, ys = frame.x_pixels(line.steps), frame.y_pixels(line.smoothed(chart.span))
            smooth = _line(xs, ys, color=line.css_color, width=2.2)
            shapes.append(_group("smooth", line.color, smooth))
    return Drawing("".join(shapes), [*_labels(frame)])


def _axes(frame: Frame) -> Iterator[str]:
    ends = np.array([frame.left, frame.right])
    for height, _ in frame.y_ticks:
        yield _line(ends, frame.y_pixels(np.array([height, height])), width=0.7, alpha=0.3)
    yield _line(ends, np.full(2, frame.bottom), width=1.0, alpha=0.7)
    for step, _ in frame.x_ticks:
        tick = np.array([frame.bottom - 3, frame.bottom])
        yield _line(frame.x_pixels(np.array([step, step])), tick, width=1.0, alpha=0.7)


def _labels(frame: Frame) -> Iterator[Label]:
    """Yield the texts of the ticks, and the unit to the left of the first step."""
    for height, text in frame.y_ticks:
        [y] = frame.y_pixels(np.array([height]))
        yield Label(frame.left - 6, HEIGHT - y + 3.6, text, "end")
    free = frame.left - 6
    for step, text in frame.x_ticks:
        [x], width = frame.x_pixels(np.array([step])), FONT_SIZE * DIGIT_WIDTH * len(text)
        yield Label(min(x, WIDTH - 2 - width / 2), HEIGHT - 9, text, "middle")
        free = min(free, x - width / 2 - 4)
    if frame.x_ticks:
        yield Label(free, HEIGHT - 9, frame.x_unit, "end")


def _mark(frame: Frame, mark: ChartMark) -> str:
    [x] = frame.x_pixels(np.array([mark.at]))
    if not frame.left <= x <= frame.right:
        return ""
    heights, color, y = np.array([frame.bottom, frame.top]), mark.kind_color, frame.top + 5
    drawn = _line(np.full(2, x), heights, color=color, width=1.4, alpha=0.9)
    drawn += _filled([np.array([[x - 4, y], [x + 4, y], [x, y - 6]])], color=color)
    if mark.color is not None:
        box = _filled([_box(x - 3, x + 3, y + 1, y + 4)], color=rank_color(mark.color))
        drawn += _group("curve", mark.color, box)
    return drawn


def _nonfinite(frame: Frame, lines: Sequence[ChartLine]) -> str:
    is_marked = np.zeros(WIDTH * 2, dtype=np.bool_)  # two entries for each pixel
    for line in lines:
        xs = frame.x_pixels(line.steps)
        for a, b in slices(line.nonfinite > 0):
            is_marked[round((xs[a] - 1) * 2) : round((xs[b - 1] + 1) * 2)] = True
    spans = [(a / 2, b / 2) for a, b in slices(is_marked)]
    bottom, top = frame.bottom, frame.top
    shade = _filled([_box(*span, bottom, top) for span in spans], color=ALERT, alpha=0.13)
    return shade + _filled([_box(*span, top, top + 5) for span in spans], color=ALERT)


def _curve(frame: Frame, line: ChartLine) -> str:
    xs, ys = frame.x_pixels(line.steps), frame.y_pixels(line.values)
    color, band = line.css_color, ""
    if line.has_band:
        floor = np.column_stack([xs, frame.y_pixels(line.low)])
        roof = np.column_stack([xs, frame.y_pixels(line.high)])
        finite = slices(np.isfinite(line.low) & np.isfinite(line.high))
        parts = [np.concatenate([floor[a:b], roof[a:b][::-1]]) for a, b in finite]
        band = _filled(parts, color=color, alpha=0.18)
    if not line.is_strong:
        return band + _line(xs, ys, color=color, width=0.9, alpha=0.6)
    return band + _line(xs, ys, color=color, width=1.8) + _dots(xs[line.dots], ys[line.dots], color)


# ---- SVG elements


def _group(name: str, color: int | None, shapes: str) -> str:
    """Group shapes, with the CSS class of a palette colour."""
    classes = "" if color is None else f" {rank_class(color)}"
    return f'<g class="nbddp-{name}{classes}">{shapes}</g>'


def _line(xs: Numbers, ys: Numbers, *, color: str = INK, width: float, alpha: float = 1.0) -> str:
    """Return a line, with a gap where a number is NaN."""
    path = _path(xs, ys)
    look = f'{_color_attributes(color, alpha)} stroke-width="{width * 10:g}"'
    line = f'<path d="{path}" fill="none" stroke={look} stroke-linejoin="round"/>'
    return line if path else ""


def _dots(xs: Numbers, ys: Numbers, color: str) -> str:
    places = zip((xs * 10).tolist(), ((HEIGHT - ys) * 10).tolist(), strict=True)
    dots = "".join(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="22"/>' for x, y in places)
    return f"<g fill={_color_attributes(color)}>{dots}</g>" if dots else ""


def _filled(shapes: Sequence[Numbers], *, color: str, alpha: float = 1.0) -> str:
    """Return filled shapes; each is an array with a row of x and y for each corner."""
    path = "".join(f"{_path(each[:, 0], each[:, 1])}z" for each in shapes)
    return f'<path d="{path}" fill={_color_attributes(color, alpha)}/>' if path else ""


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
