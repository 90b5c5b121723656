"""The timeline as a matplotlib figure: ranks as rows, time across."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from nbddp.charts.figure import COMPUTE, DATA, STYLE, WAIT, new_figure
from nbddp.charts.palette import ALERT, INK
from nbddp.extensions.timeline.collective_timeline import TimedStep, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_ARRIVALS = 400  # lines that mark the last arrival at a collective
LINE_LENGTH = 130  # characters that fit along a timeline


def draw_timeline(timeline: Timeline, ranks: Sequence[int]) -> Figure:
    """Draw a row for each rank that shows when it computed and when it waited."""
    began, end = timeline.span
    unit, scale = ("ms", 1000.0) if timeline.seconds < 1 else ("s", 1.0)
    with mpl.rc_context(fname=STYLE):
        figure = new_figure(8.6, 0.75 + 0.26 * len(ranks))
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
