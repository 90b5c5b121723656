"""Charts, a timeline and a scaling study as matplotlib figures.

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
from matplotlib.patches import Patch

from nbddp.charts.axes import format_number, log_ticks, padded
from nbddp.charts.chart_lines import Chart, ChartLine, Numbers, slices
from nbddp.charts.palette import ALERT, INK, rank_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from nbddp.archive.scaling import Scaling, WorldSizeResult
    from nbddp.record.waiting.collective_timeline import TimedStep, Timeline

COLUMNS = 2  # of charts
WIDE, HIGH = 3.7, 2.4  # size of a chart in inches; an inch is 100 CSS pixels
MAX_NAME_LENGTH = 36  # characters of a shown name
KEY_COLUMNS = 5  # of the legend
MAX_ARRIVALS = 400  # lines that mark the last arrival at a collective
LINE_LENGTH = 130  # characters that fit along a timeline
# the colours for waiting have a contrast of 3 : 1 against white and #111
COMPUTE: dict[str, Any] = {"facecolor": INK, "alpha": 0.28, "linewidth": 0}
WAIT: dict[str, Any] = {"facecolor": "#b9690f", "linewidth": 0}
DATA: dict[str, Any] = {"facecolor": "#2f86dd", "alpha": 0.9, "linewidth": 0}
# rc_context() with this file uses matplotlib's defaults instead of the user's settings
_STYLE = Path(__file__).with_suffix(".mplstyle")


class ShownFigure(Figure):
    """A figure that a notebook can show without pyplot."""

    def _repr_png_(self) -> bytes:
        return png_of(self)[0]


def _new_figure(width: float, height: float) -> ShownFigure:
    figure = ShownFigure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def png_of(figure: Figure) -> tuple[bytes, int]:
    """Return a figure as a PNG file, and its width in CSS pixels."""
    drawn = io.BytesIO()
    with mpl.rc_context(fname=_STYLE):
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
    with mpl.rc_context(fname=_STYLE):
        figure = _new_figure(columns * WIDE, rows * HIGH + 0.15 * len(names))
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


# ---- ranks as rows, time across


def draw_timeline(timeline: Timeline, ranks: Sequence[int]) -> Figure:
    """Draw a row for each rank that shows when it computed and when it waited."""
    began, end = timeline.span
    unit, scale = ("ms", 1000.0) if timeline.seconds < 1 else ("s", 1.0)
    with mpl.rc_context(fname=_STYLE):
        figure = _new_figure(8.6, 0.75 + 0.26 * len(ranks))
        ax = figure.add_subplot()
        for row, rank in enumerate(ranks):
            ended = timeline.died.get(rank, end)
            ax.broken_barh([(0, (ended - began) * scale)], (row - 0.31, 0.62), **COMPUTE)
            for kind, style in (("data", DATA), ("wait", WAIT)):
                bars = [
                    ((start - began) * scale, (stop - start) * scale)
                    for what, start, stop in timeline.pieces(rank)
                    if what == kind
                ]
                ax.broken_barh(bars, (row - 0.31, 0.62), **style)
            if rank in timeline.died:
                style = {"color": ALERT, "markersize": 6, "clip_on": False}  # it may be at the edge
                ax.plot((ended - began) * scale, row, "x", **style)
        _draw_arrivals(ax, timeline, ranks, scale)
        ax.set(xlim=(0, max(timeline.seconds, 1e-9) * scale), ylim=(len(ranks) - 0.5, -0.5))
        ax.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks], weight="bold")
        ax.tick_params(axis="y", length=0)
        ax.spines[["left", "bottom"]].set_visible(False)
        ax.xaxis.set_major_formatter(f"{{x:g}} {unit}")
        steps: list[TimedStep] = []  # their names, and "step" before the first, do not touch
        for at, step in timeline.steps:
            gap = timeline.seconds * (len(f"{step:g}") + 3) / LINE_LENGTH
            if not steps or at - steps[-1][0] > gap:
                steps.append((at, step))
        if steps:
            places = [(at - began) * scale for at, _ in steps]
            ax.vlines(places, -0.5, len(ranks) - 0.5, colors=INK, linewidth=0.6, alpha=0.45)
            top = ax.secondary_xaxis("top")
            top.set_xticks(places, [f"step {steps[0][1]:g}", *(f"{it:g}" for _, it in steps[1:])])
            top.spines["top"].set_visible(False)
            top.tick_params(length=0)
        keys = {
            "computing, communicating": Patch(**COMPUTE),
            "waiting for the last rank": Patch(**WAIT),
            "waiting for data": Patch(**DATA),
            "the last one comes, the others go on": Line2D([], [], color=INK, ls="", marker="|"),
        }
        if timeline.died:
            keys["died"] = Line2D([], [], color=ALERT, marker="x", linestyle="")
        figure.legend(keys.values(), keys.keys(), loc="outside upper left", ncols=len(keys))
    return figure


def _draw_arrivals(ax: Axes, timeline: Timeline, ranks: Sequence[int], scale: float) -> None:
    """Draw a line at each last arrival, between that rank and the ranks that waited for it."""
    rows = {rank: row for row, rank in enumerate(ranks)}
    waited = [collective for collective in timeline.meetings if collective.total_wait]
    waited.sort(key=lambda collective: -collective.total_wait)
    for collective in waited[:MAX_ARRIVALS]:
        waits = collective.wait_seconds.items()
        waiting = [rows[rank] for rank, wait in waits if wait and rank in rows]
        if waiting and collective.last_rank in rows:
            ends = [*waiting, rows[collective.last_rank]]
            at = (collective.at - timeline.span[0]) * scale
            ax.vlines(at, min(ends), max(ends), colors=INK, linewidth=0.6)


# ---- one cell on several world sizes


def draw_scaling(scaling: Scaling) -> Figure:
    """Draw the speed-up with the ideal linear one, and how the ranks spent their time."""
    with mpl.rc_context(fname=_STYLE):
        figure = _new_figure(7.2, 2.3)
        speed_up, shares = figure.subplots(1, 2, width_ratios=(6, 5))
        _draw_speed_up(speed_up, scaling)
        if any(size.share("waiting") is not None for size in scaling.sizes):
            _draw_shares(shares, scaling.sizes)
        else:
            shares.remove()
    return figure


def _draw_speed_up(ax: Axes, scaling: Scaling) -> None:
    sizes, color = scaling.sizes, rank_color(0)
    places = range(len(sizes))
    speed_ups = [scaling.speed_up(size) for size in sizes]
    linear = [size.ranks / sizes[0].ranks for size in sizes]
    ax.plot(places, linear, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), label="linear")
    ax.plot(places, speed_ups, "o-", color=color, linewidth=1.3, markersize=3, label="measured")
    for at, size in enumerate(sizes):
        paces = [each.rate / size.rate * speed_ups[at] for each in size.rounds]
        ax.vlines(at, min(paces), max(paces), colors=color, linewidth=2.2, alpha=0.5)
        text: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "weight": "bold"}
        ax.annotate(f"{speed_ups[at]:.2f}", (at, speed_ups[at]), (0, -11), **text)
    ax.set_title("speed-up", loc="left")
    names = [f"{size.ranks} rank{'' if size.ranks == 1 else 's'}" for size in sizes]
    ax.set_xticks(places, names)
    ax.set_ylim(bottom=0)
    ax.grid(axis="y")
    ax.margins(x=0.2)
    ax.legend(loc="upper left")


def _draw_shares(ax: Axes, sizes: Sequence[WorldSizeResult]) -> None:
    waits = [size.share("waiting") or 0.0 for size in sizes]
    loads = [size.share("loading") or 0.0 for size in sizes]
    computing = [max(0.0, 1 - wait - load) for wait, load in zip(waits, loads, strict=True)]
    below = [sum(each) for each in zip(computing, waits, strict=True)]
    places = range(len(sizes))
    ax.bar(places, computing, 0.55, label="computing, communicating", **COMPUTE)
    ax.bar(places, waits, 0.55, bottom=computing, label="waiting", **WAIT)
    ax.bar(places, loads, 0.55, bottom=below, label="for data", **DATA)
    ax.set_title("where the ranks' time went", loc="left", pad=16)
    ax.set_xticks(places, [f"{size.ranks}" for size in sizes])
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
