"""The results of a cell on several world sizes as a matplotlib figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from nbddp.charts.figure import COMPUTE, DATA, STYLE, WAIT, new_figure
from nbddp.charts.palette import INK, rank_color
from nbddp.extensions.sweeps.scaling_results import Scaling, WorldSizeResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_scaling(scaling: Scaling) -> Figure:
    """Draw the speed-up with the ideal linear one, and how the ranks spent their time."""
    with mpl.rc_context(fname=STYLE):
        figure = new_figure(7.2, 2.3)
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
