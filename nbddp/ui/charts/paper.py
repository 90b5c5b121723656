"""A chart as a PNG, drawn with matplotlib's Agg; importing this loads matplotlib.

It neither reads nor changes how users set up plots of their own: there is no pyplot in it, and
every style is said. Any thread may draw.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, get_font
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Affine2D
from PIL import Image

from nbddp.charts.palette import rank_color
from nbddp.record.metrics import Curve
from nbddp.ui.charts.drawing import ALERT, INK, MANY_RANKS, Chart, draw
from nbddp.ui.charts.frame import HEIGHT, SMALL, WIDTH

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

HEAD = 38  # CSS pixels above the chart, for its name and what its lines are
SCALE = 2  # pixels of a fine screen in each of them
LARGE = 12.5  # size of the name
COLUMNS, GAP = 2, 10  # of charts in one picture, and CSS pixels between them

_FONTS = Path(mpl.get_data_path(), "fonts", "ttf")
PLAIN, BOLD = _FONTS / "DejaVuSans.ttf", _FONTS / "DejaVuSans-Bold.ttf"
_POINT = 0.72  # points in a CSS pixel, at 100 dots per inch
_COLORS = 128  # in the PNG: a third of the bytes, and no difference that one sees


def draw_png(name: str, curves: Mapping[int, Curve]) -> bytes:
    """The chart of a metric, with its name, its newest value, and what its lines are."""
    chart, paper = Chart.of(name, curves), Paper()
    draw(paper, chart)
    _write_name(paper, chart)
    _write_legend(paper, chart)
    return paper.png()


def draw_sheet(curves: Mapping[str, Mapping[int, Curve]]) -> tuple[bytes, int]:
    """The charts of several metrics in one picture, and how wide it is in CSS pixels."""
    pictures = [Image.open(io.BytesIO(draw_png(*each))).convert("RGBA") for each in curves.items()]
    columns = min(COLUMNS, len(pictures))
    wide, high = (WIDTH + GAP) * SCALE, (HEIGHT + HEAD + GAP) * SCALE
    sheet = Image.new("RGBA", (columns * wide, -(-len(pictures) // columns) * high))
    for number, picture in enumerate(pictures):
        sheet.paste(picture, (number % columns * wide, number // columns * high))
    return _file(sheet), columns * (WIDTH + GAP)


def draw_figure(charts: Sequence[Chart]) -> Figure:
    """Charts on a figure that may be saved as PDF, SVG or PNG; its ground is white."""
    columns = min(COLUMNS, len(charts))
    wide, high = WIDTH + GAP, HEIGHT + HEAD + GAP
    rows = -(-len(charts) // columns)
    figure = blank_figure(columns * wide, rows * high)
    whiten(figure)
    for number, chart in enumerate(charts):
        corner = number % columns * wide, (rows - 1 - number // columns) * high
        paper = Paper(figure=figure, corner=(float(corner[0]), float(corner[1])))
        draw(paper, chart)
        _write_name(paper, chart)
        _write_legend(paper, chart)
    return figure


def _file(picture: Image.Image) -> bytes:
    target = io.BytesIO()
    picture.quantize(_COLORS, method=Image.Quantize.FASTOCTREE).save(target, "PNG")
    return target.getvalue()


def _write_name(paper: Paper, chart: Chart) -> None:
    x, y, gap = 8.0, HEIGHT + HEAD - 17.0, 7.0
    facts = " · ".join(chart.facts)
    paper.text(WIDTH - x, y, facts, align="right", color=ALERT if chart.frame.lost else INK)
    taken = paper.width_of(chart.said_value, size=LARGE, font=BOLD) + paper.width_of(facts) + gap
    text, room = readable(chart.name), WIDTH - 2 * x - gap - taken
    while (width := paper.width_of(text, size=LARGE)) > room:
        keep = min(len(text) - 2, int(len(text) * room / width))
        text = text[:keep] + "…"
    paper.text(x, y, text, size=LARGE)
    color = INK if chart.value is None or isfinite(chart.value) else ALERT
    paper.text(x + width + gap, y, chart.said_value, size=LARGE, font=BOLD, color=color)


def _write_legend(paper: Paper, chart: Chart) -> None:
    x, y = 8.0, HEIGHT + 4.0
    keys = [(chart.said_lines, chart.color, BOLD)]
    if len(chart.lines) > 1 and len(chart.thin) <= MANY_RANKS:
        keys += [(f"rank {rank}", rank_color(rank), PLAIN) for rank in chart.thin]
    for text, color, font in keys:
        width = paper.width_of(text, font=font)
        if x + width > WIDTH:
            break
        paper.text(x, y, text, color=color, font=font)
        x += width + 9


class ShownFigure(Figure):
    """A figure that a notebook shows, though pyplot does not know of it."""

    def _repr_png_(self) -> bytes:
        target = io.BytesIO()
        self.savefig(target, format="png")
        return target.getvalue()


def blank_figure(width: float, height: float) -> Figure:
    """Nothing on a transparent ground, so large in CSS pixels."""
    figure = ShownFigure(figsize=(width / 100, height / 100), dpi=100 * SCALE, frameon=False)
    figure.set_layout_engine("none")
    return figure


def whiten(figure: Figure) -> None:
    """Give it a white ground, for papers and reports."""
    figure.patch.set(facecolor="white", alpha=1.0)
    figure.set_frameon(True)


class Paper:
    """A transparent sheet that is measured in CSS pixels from its lower left corner.

    Args:
        figure: where to draw; None for a figure of this size.
        corner: where the sheet's lower left corner is on that, in CSS pixels.
    """

    def __init__(
        self,
        width: float = WIDTH,
        height: float = HEIGHT + HEAD,
        *,
        figure: Figure | None = None,
        corner: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self._is_left_out = False
        self._figure = figure or blank_figure(width, height)
        self._canvas: Any = FigureCanvasAgg(self._figure)  # Any: it is untyped
        in_inches = Affine2D().translate(*corner).scale(0.01)
        self._transform = in_inches + self._figure.dpi_scale_trans

    def line(
        self, xs: Numbers, ys: Numbers, *, color: str = INK, width: float, alpha: float = 1.0
    ) -> None:
        """Draw a line, with a gap where a number is NaN."""
        line = Line2D(xs, ys, color=color, linewidth=width * _POINT, linestyle="-", marker="None")
        line.set(alpha=alpha, solid_capstyle="butt", solid_joinstyle="round")
        self._add(line)

    def dots(self, xs: Numbers, ys: Numbers, *, color: str) -> None:
        """Draw a dot at each place."""
        dots = Line2D(xs, ys, color=color, linestyle="None", marker="o", fillstyle="full")
        dots.set(markersize=4.5 * _POINT, markeredgewidth=0)
        self._add(dots)

    def shapes(self, corners: Sequence[Numbers], *, color: str, alpha: float) -> None:
        """Fill shapes, each given by rows of x and y."""
        shapes = PolyCollection(corners, facecolors=color, edgecolors="none", alpha=alpha)
        self._add(shapes)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        color: str = INK,
        size: float = SMALL,
        font: Path = PLAIN,
        align: Literal["left", "center", "right"] = "left",
    ) -> None:
        """Write a line of text, letter by letter: nothing in it is a formula."""
        written = Text(x, y, text, color=color, fontproperties=_font(font, size), usetex=False)
        written.set(horizontalalignment=align, verticalalignment="baseline", parse_math=False)
        self._add(written)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Leave out what a page shows on demand."""
        self._is_left_out = name == "smooth"
        yield
        self._is_left_out = False

    def width_of(self, text: str, *, size: float = SMALL, font: Path = PLAIN) -> float:
        """How wide a text would be."""
        measure = self._canvas.get_renderer().get_text_width_height_descent
        return float(measure(text, _font(font, size), ismath=False)[0]) / SCALE

    def png(self) -> bytes:
        """The sheet as a file."""
        self._canvas.draw()
        return _file(Image.fromarray(np.asarray(self._canvas.buffer_rgba())))

    def _add(self, artist: Artist) -> None:
        if self._is_left_out:
            return
        artist.set_transform(self._transform)
        self._figure.add_artist(artist)


def readable(name: str) -> str:
    r"""A name in one line, with a mark for each letter that the font does not have.

    >>> readable("learning\trate \N{CJK UNIFIED IDEOGRAPH-4E2D}")
    'learning rate �'
    """
    font = get_font(PLAIN)
    text = " ".join("".join(char if char.isprintable() else " " for char in name).split())
    has = font.get_char_index
    return "".join(char if has(ord(char)) else "\N{REPLACEMENT CHARACTER}" for char in text)


def _font(path: Path, size: float) -> FontProperties:
    return FontProperties(fname=str(path), size=size * _POINT)
