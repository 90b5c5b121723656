"""Charts as matplotlib figures, and the style of all figures.

Importing this module loads matplotlib, but not pyplot. Figures have a transparent background and
medium greys, for light pages, dark pages and paper. They ignore the user's matplotlib settings, and
do not change them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.lines import Line2D

from nbddp.charts.axes import format_number, log_ticks, padded
from nbddp.charts.chart_lines import Chart, ChartLine, Numbers, slices
from nbddp.charts.palette import ALERT, INK, rank_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 2  # of charts
WIDE, HIGH = 3.7, 2.4  # size of a chart in inches; an inch is 100 CSS pixels
MAX_NAME_LENGTH = 36  # characters of a shown name
KEY_COLUMNS = 5  # of the legend
# the colours for waiting have a contrast of 3 : 1 against white and #111
COMPUTE: dict[str, Any] = {"facecolor": INK, "alpha": 0.28, "linewidth": 0}
WAIT: dict[str, Any] = {"facecolor": "#b9690f", "linewidth": 0}
DATA: dict[str, Any] = {"facecolor": "#2f86dd", "alpha": 0.9, "linewidth": 0}
# rc_context() with this file uses matplotlib's defaults instead of the user's settings
STYLE = Path(__file__).with_suffix(".mplstyle")


class ShownFigure(Figure):
    """A figure that a notebook can show without pyplot."""

    def _repr_png_(self) -> bytes:
        return png_of(self)[0]


def new_figure(width: float, height: float) -> ShownFigure:
    """Return an empty figure of this size in inches."""
    figure = ShownFigure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def png_of(figure: Figure) -> tuple[bytes, int]:
    """Return a figure as a PNG file, and its width in CSS pixels."""
    drawn = io.BytesIO()
    with mpl.rc_context(fname=STYLE):
        figure.savefig(drawn, format="png")
    return drawn.getvalue(), round(figure.get_figwidth() * 100)


# ---- charts


def draw_charts(
    charts: Sequence[Chart], *, names: Sequence[str] = (), is_smooth: bool = False
) -> Figure:
    """Draw charts next to each other.

    Args:
        charts: one chart or more.
        names: the labels and names of the compared runs, for a common legend at the top.
        is_smooth: draw smooth lines over faint ones.
    """
    columns = min(COLUMNS, len(charts))
    rows = -(-len(charts) // columns)
    with mpl.rc_context(fname=STYLE):
        figure = new_figure(columns * WIDE, rows * HIGH + 0.15 * len(names))
        for number, chart in enumerate(charts, start=1):
            _draw_chart(figure.add_subplot(rows, columns, number), chart, is_smooth=is_smooth)
        if names:
            handles = [Line2D([], [], color=rank_color(at)) for at in range(len(names))]
            figure.legend(
                handles, [*map(printable_name, names)], loc="outside upper left", fontsize=9
            )
    return figure


def _draw_chart(ax: Axes, chart: Chart, *, is_smooth: bool) -> None:
    ax.grid(axis="y")
    ax.set_xlabel(chart.x_unit, loc="left", labelpad=0)
    if chart.is_log and chart.limits:
        ax.set_yscale("log")
        ticks = log_ticks(*padded(*np.log10(chart.limits).tolist()))
        ax.set_yticks(ticks, map(format_number, ticks))
        ax.minorticks_off()
    for line in chart.lines:
        for a, b in slices(line.nonfinite > 0):
            ax.axvspan(line.steps[a], line.steps[b - 1], color=ALERT, alpha=0.15, linewidth=1)
    for mark in chart.marks:
        ax.axvline(mark.at, color=mark.kind_color, linewidth=1)
        color = mark.kind_color if mark.color is None else rank_color(mark.color)
        top = ax.get_xaxis_transform()
        ax.plot([mark.at], [1], "v", color=color, transform=top, clip_on=False, markersize=4)
    for line in chart.curves():
        _draw_line(ax, chart, line, is_smooth=is_smooth)
    _write_head(ax, chart)


def _draw_line(ax: Axes, chart: Chart, line: ChartLine, *, is_smooth: bool) -> None:
    def values(heights: Numbers) -> Numbers:
        return np.power(10, heights) if chart.is_log else heights

    color, shown = line.css_color, values(line.values)
    if line.has_band:
        low, high = values(line.low), values(line.high)
        ax.fill_between(line.steps, low, high, color=color, alpha=0.18, linewidth=0)
    if not line.is_strong:
        ax.plot(line.steps, shown, color=color, linewidth=0.7, alpha=0.6, label=line.key)
        return
    dots, alpha = np.flatnonzero(line.dots).tolist(), 0.3 if is_smooth else 1.0
    look: dict[str, Any] = {"color": color, "linewidth": 1.3, "label": chart.legend or line.key}
    ax.plot(line.steps, shown, "o-", markersize=2.6, markevery=dots, alpha=alpha, **look)
    if is_smooth:
        ax.plot(line.steps, values(line.smoothed(chart.span)), **look)


def _write_head(ax: Axes, chart: Chart) -> None:
    """Write the name, the newest value, the notes, and a legend."""
    handles, texts = ax.get_legend_handles_labels()
    pairs = zip(texts, handles, strict=True)
    keys = dict(sorted(pairs, key=lambda pair: pair[0] != chart.legend))
    pad = 4 + 11 * -(-len(keys) // KEY_COLUMNS)
    name = printable_name(chart.name)
    title = name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 1]}…"
    value = "" if chart.value is None else f"  {format_number(chart.value)}"
    ax.set_title(f"{title}{value}", loc="left", pad=pad)
    color = ALERT if chart.nonfinite else INK
    ax.set_title(" · ".join(chart.facts), loc="right", fontsize=7, color=color, pad=pad)
    if keys:
        ax.legend(keys.values(), keys, loc="lower left", bbox_to_anchor=(0, 1), ncols=KEY_COLUMNS)


def printable_name(name: str) -> str:
    r"""Return a name in one line, with U+FFFD for each letter that the font lacks.

    >>> printable_name("learning\trate \N{CJK UNIFIED IDEOGRAPH-4E2D}")
    'learning rate �'
    """
    font = get_font(findfont("DejaVu Sans"))
    text = " ".join("".join(char if char.isprintable() else " " for char in name).split())
    has = font.get_char_index
    return "".join(char if has(ord(char)) else "\N{REPLACEMENT CHARACTER}" for char in text)
