"""Speed-up against linear, and where the ranks' time went, as a PNG for light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from nbddp.archive.scaling import Scaling, Size
from nbddp.charts.palette import rank_color
from nbddp.formatting import plural
from nbddp.ui.charts.drawing import INK
from nbddp.ui.charts.paper import BOLD, Paper
from nbddp.ui.charts.spans import COMPUTE, DATA, WAIT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

WIDE, HIGH = 720, 230  # CSS pixels
LEFT, HALF, FOOT, HEAD, GAP = 40.0, 350.0, 26.0, 52.0, 34.0
SHARES = (("computing, sending", COMPUTE), ("waiting", WAIT), ("for data", DATA))


def draw_scaling(scaling: Scaling) -> tuple[bytes, int]:
    """The picture, and how wide it is in CSS pixels."""
    paper = Paper(WIDE, HIGH)
    _draw_speed_up(paper, scaling)
    if any(size.share("waiting") is not None for size in scaling.sizes):
        _draw_shares(paper, scaling)
    return paper.png(), WIDE


def _draw_speed_up(paper: Paper, scaling: Scaling) -> None:
    sizes = scaling.sizes
    linear = [size.ranks / sizes[0].ranks for size in sizes]
    ends = [scaling.speed_up(size) * _ends(size)[1] for size in sizes]
    most = max([*linear, *ends]) * 1.06
    xs = _places(LEFT, HALF, len(sizes))
    room = HIGH - FOOT - HEAD

    def up(values: Sequence[float]) -> Numbers:
        return FOOT + np.array(values) / most * room

    paper.text(8, HIGH - 17, "speed-up", font=BOLD, size=12.5)
    color = rank_color(0)
    for x, text, ink in ((8.0, "measured", color), (74.0, "- - linear", INK)):
        paper.text(x, HIGH - 34, text, color=ink)
    for tick in _ticks(most):
        y = up([tick, tick])
        paper.line(np.array([LEFT, HALF]), y, width=0.7, alpha=0.3)
        paper.text(LEFT - 6, y[0] - 3.6, f"{tick:g}", align="right")
    _dashes(paper, xs, up(linear))
    for x, size in zip(xs, sizes, strict=True):
        low, high = up([scaling.speed_up(size) * end for end in _ends(size)])
        paper.line(np.array([x, x]), np.array([low, high]), color=color, width=3.0, alpha=0.5)
        paper.text(x, 9, plural(size.ranks, "rank"), align="center")
    ys = up([scaling.speed_up(size) for size in sizes])
    paper.line(xs, ys, color=color, width=1.8)
    paper.dots(xs, ys, color=color)
    for x, size in zip(xs, sizes, strict=True):
        [y] = up([scaling.speed_up(size) * _ends(size)[0]])
        paper.text(x, y - 14, f"{scaling.speed_up(size):.2f}", align="center", font=BOLD)


def _ends(size: Size) -> tuple[float, float]:
    """The slowest and the fastest round, as a part of the median."""
    paces = [each.pace for each in size.rounds]
    return min(paces) / size.pace, max(paces) / size.pace


def _draw_shares(paper: Paper, scaling: Scaling) -> None:
    left, right = HALF + GAP + LEFT, WIDE - 10.0
    xs = _places(left, right, len(scaling.sizes))
    room = HIGH - FOOT - HEAD
    half = min(26.0, (right - left) / len(scaling.sizes) / 3)
    paper.text(left - LEFT + 8, HIGH - 17, "where the ranks' time went", font=BOLD, size=12.5)
    x = left - LEFT + 8
    for name, (color, alpha) in SHARES:
        paper.shapes([_box(x, x + 9, HIGH - 35, HIGH - 26)], color=color, alpha=alpha)
        paper.text(x + 13, HIGH - 34, name)
        x += paper.width_of(name) + 28
    for x, size in zip(xs, scaling.sizes, strict=True):
        wait, load = size.share("waiting") or 0.0, size.share("loading") or 0.0
        bottom = FOOT
        for share, (color, alpha) in (
            (max(0.0, 1 - wait - load), COMPUTE),
            (wait, WAIT),
            (load, DATA),
        ):
            top = bottom + share * room
            box = _box(x - half, x + half, bottom, top)
            paper.shapes([box], color=color, alpha=alpha)
            bottom = top
        paper.text(x, 9, f"{size.ranks}", align="center")


def _places(left: float, right: float, count: int) -> Numbers:
    """Where each size is: all as far apart."""
    return left + (np.arange(count) + 0.5) * (right - left) / count


def _ticks(most: float) -> list[float]:
    step = next(each for each in (0.5, 1, 2, 4, 8, 16, 32, 64, 10**6) if most / each <= 6)
    return [float(each) for each in np.arange(0, most, step)]


def _dashes(paper: Paper, xs: Numbers, ys: Numbers) -> None:
    fine = np.linspace(xs[0], xs[-1], 60) if len(xs) > 1 else xs
    heights = np.interp(fine, xs, ys)
    heights[2::3] = np.nan
    paper.line(fine, heights, width=1.2, alpha=0.9)


def _box(left: float, right: float, bottom: float, top: float) -> Numbers:
    return np.array([[left, bottom], [right, bottom], [right, top], [left, top]])
