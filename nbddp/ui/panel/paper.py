"""A transparent sheet to draw a chart on, with matplotlib's Agg; importing it loads matplotlib.

It neither reads nor changes how users set up plots of their own: there is no pyplot in it, and
every style is said. Any thread may draw.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
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

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

WIDTH, HEIGHT = 360, 220  # CSS pixels
SCALE = 2  # pixels of a fine screen in each of them
INK = "#7b7b7b"  # has the same contrast to white as to #111
SMALL, LARGE = 10.0, 12.5  # sizes of text
DIGIT = 0.64  # the width of a digit, in sizes of its text

_FONTS = Path(mpl.get_data_path(), "fonts", "ttf")
PLAIN, BOLD = _FONTS / "DejaVuSans.ttf", _FONTS / "DejaVuSans-Bold.ttf"
_POINT = 0.72  # points in a CSS pixel, at 100 dots per inch
_COLORS = 128  # in the PNG: a third of the bytes, and no difference that one sees


class Paper:
    """A sheet that is measured in CSS pixels from its lower left corner."""

    def __init__(self) -> None:
        size = (WIDTH / 100, HEIGHT / 100)
        self._figure = Figure(figsize=size, dpi=100 * SCALE, frameon=False)
        self._figure.set_layout_engine("none")
        self._canvas: Any = FigureCanvasAgg(self._figure)  # Any: it is untyped
        self._transform = Affine2D().scale(SCALE)

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

    def width_of(self, text: str, *, size: float, font: Path = PLAIN) -> float:
        """How wide a text would be."""
        measure = self._canvas.get_renderer().get_text_width_height_descent
        return float(measure(text, _font(font, size), ismath=False)[0]) / SCALE

    def png(self) -> bytes:
        """The sheet as a file."""
        self._canvas.draw()
        picture = Image.fromarray(np.asarray(self._canvas.buffer_rgba()))
        target = io.BytesIO()
        picture.quantize(_COLORS, method=Image.Quantize.FASTOCTREE).save(target, "PNG")
        return target.getvalue()

    def _add(self, artist: Artist) -> None:
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
