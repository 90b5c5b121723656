"""A sheet that becomes SVG: text that Python writes, which a page draws in its own colours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Literal

import numpy as np

from nbddp.ui.charts.drawing import INK
from nbddp.ui.charts.frame import HEIGHT, SMALL, WIDTH
from nbddp.ui.charts.lines import runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

_ANCHORS = {"left": "start", "center": "middle", "right": "end"}
_BOX = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH * 10} {HEIGHT * 10}"'


@dataclass(frozen=True, slots=True)
class Label:
    """A few letters beside an axis, whose baseline is ``y`` below the upper edge."""

    x: float
    y: float
    text: str
    align: Literal["left", "center", "right"]


class SvgSheet:
    """A sheet measured in CSS pixels; in the file each has ten units, so that all are whole.

    Attributes:
        labels: what is to be written; a page that takes SVG away would leave its text behind, so
            that none is in there.
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
                f'<path d="{path}" fill="none" stroke="{_paint(color)}"'
                f' stroke-width="{width * 10:g}" stroke-linejoin="round"{_alpha(alpha)}/>'
            )

    def dots(self, xs: Numbers, ys: Numbers, *, color: str) -> None:
        """Draw a dot at each place."""
        places = zip((xs * 10).tolist(), ((HEIGHT - ys) * 10).tolist(), strict=True)
        dots = "".join(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="22"/>' for x, y in places)
        if dots:
            self._parts.append(f'<g fill="{_paint(color)}">{dots}</g>')

    def shapes(self, corners: Sequence[Numbers], *, color: str, alpha: float) -> None:
        """Fill shapes, each given by rows of x and y."""
        path = "".join(f"{_path(each[:, 0], each[:, 1])}z" for each in corners)
        if path:
            self._parts.append(f'<path d="{path}" fill="{_paint(color)}"{_alpha(alpha)}/>')

    def text(
        self, x: float, y: float, text: str, *, align: Literal["left", "center", "right"] = "left"
    ) -> None:
        """Write a few letters."""
        self.labels.append(Label(x, HEIGHT - y, text, align))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Give what is drawn within it a class."""
        self._parts.append(f'<g class="nbddp-{name}">')
        yield
        self._parts.append("</g>")

    def inline(self, said: str) -> str:
        """A part of a page, without the labels; ``said``, escaped, is for who does not see it."""
        return f'<svg {_BOX} role="img" aria-label="{said}">{"".join(self._parts)}</svg>'

    def picture(self) -> str:
        """A file of its own, with the labels, and colours that do for light and dark."""
        written = "".join(
            f'<text x="{label.x * 10:.0f}" y="{label.y * 10:.0f}"'
            f' text-anchor="{_ANCHORS[label.align]}">{escape(label.text)}</text>'
            for label in self.labels
        )
        body = "".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {_BOX} color="{INK}">'
            f"<style>.nbddp-smooth{{display:none}}</style>{body}"
            f'<g fill="{INK}" font-family="system-ui,sans-serif" font-size="{SMALL * 10:g}">'
            f"{written}</g></svg>"
        )


def _paint(color: str) -> str:
    return "currentColor" if color == INK else color


def _alpha(alpha: float) -> str:
    return "" if alpha == 1.0 else f' opacity="{alpha:g}"'


def _path(xs: Numbers, ys: Numbers) -> str:
    """Lines from point to point; each is said by how far it is from the one before."""
    is_there = np.isfinite(xs) & np.isfinite(ys)
    places = np.column_stack([xs, HEIGHT - ys]) * 10
    found: list[str] = []
    for a, b in runs(is_there):
        points = np.rint(places[a:b]).astype(np.int64)
        (x, y), *_ = points.tolist()
        moves = " ".join([f"{dx} {dy}" for dx, dy in np.diff(points, axis=0).tolist()])
        found.append(f"M{x} {y}l{moves}" if moves else f"M{x} {y}")
    return "".join(found)
