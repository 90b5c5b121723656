"""The speed of collectives as a matplotlib figure: time and bus bandwidth over the size."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from nbddp.charts.figure import STYLE, new_figure
from nbddp.charts.palette import INK, rank_color
from nbddp.extensions.bench.speeds import MEMCPY, Speeds
from nbddp.formatting import format_bytes

LINE = {"linestyle": "-", "linewidth": 1.3, "marker": "o", "markersize": 2.6}


def draw_speeds(speeds: Speeds) -> Figure:
    """Draw the time and the bus bandwidth of each collective."""
    with mpl.rc_context(fname=STYLE):
        figure = new_figure(7.4, 2.8)
        times, bandwidths = figure.subplots(1, 2)
        for number, name in enumerate(speeds.times):
            look: dict[str, Any] = {"color": rank_color(number), "label": name, **LINE}
            if name == MEMCPY:
                look |= {"color": INK, "linestyle": "--"}
            micros = [1e6 * seconds for seconds in speeds.times[name]]
            times.plot(speeds.sizes, micros, **look)
            bandwidths.plot(speeds.sizes, speeds.bandwidths(name), **look)
        for ax, title in ((times, "time of a call in µs"), (bandwidths, "bus bandwidth in GB/s")):
            ax.set_title(title, loc="left")
            ax.set(xscale="log", yscale="log")
            ax.yaxis.set_major_formatter("{x:g}")
            ax.set_xticks(speeds.sizes, map(format_bytes, speeds.sizes))
            ax.minorticks_off()
            ax.grid(axis="y")
        handles, names = times.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=len(names))
    return figure
