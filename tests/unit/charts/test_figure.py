"""Figures of charts, on any background."""

import io
import subprocess
import sys
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from drivers.inside import imported
from losses import falling, losses, steep
from matplotlib.figure import Figure
from matplotlib.image import imread

from nbddp.charts import axes, palette, sparkline
from nbddp.charts.axes import AxisScale
from nbddp.charts.chart_lines import Chart, rank_chart
from nbddp.charts.figure import draw_charts, png_of, printable_name
from nbddp.charts.palette import INK, rank_color
from nbddp.record import metrics as record_metrics
from nbddp.record.metrics import MetricStore


def chart(name: str = "loss", ranks: int = 2, scale: AxisScale = AxisScale.AUTO) -> Chart:
    return rank_chart(name, losses(falling, ranks=ranks), scale)


def texts(figure: Figure) -> list[str]:
    [ax] = figure.axes
    keys = [text.get_text() for text in ax.get_legend().get_texts()]
    return [ax.get_title("left"), ax.get_title("right"), ax.get_xlabel(), *keys]


def test_a_figure_shows_name_value_scale_and_a_legend_of_all_lines() -> None:
    assert texts(draw_charts([chart()])) == ["loss  0.375", "", "step", "mean of 2 ranks", "0", "1"]
    alone = rank_chart("loss", losses(steep))
    assert texts(draw_charts([alone])) == ["loss  1.122e-5", "log scale", "step", "rank 0"]
    [ax] = draw_charts([alone]).axes
    assert ax.get_yscale() == "log"
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["0.0001", "0.01", "1"]


def test_lines_have_the_colour_of_their_rank_and_smooth_lines_cover_faint_lines() -> None:
    def lines(*, is_smooth: bool) -> list[tuple[str, float]]:
        [ax] = draw_charts([chart()], is_smooth=is_smooth).axes
        drawn = [line for line in ax.lines if line.get_linestyle() == "-"]
        return [(str(line.get_color()), float(line.get_alpha() or 1)) for line in drawn]

    thin = [(rank_color(0), 0.6), (rank_color(1), 0.6)]
    assert lines(is_smooth=False) == [*thin, (INK, 1.0)]
    assert lines(is_smooth=True) == [*thin, (INK, 0.3), (INK, 1.0)]


def test_a_figure_is_small_and_transparent_even_without_values() -> None:
    png, width = png_of(draw_charts([chart()] * 3))
    picture = imread(io.BytesIO(png))
    assert (len(png) < 90_000, width) == (True, 740)
    assert picture.shape[1] == 2 * width
    assert (picture[..., 3] == 0).mean() > 0.6
    assert not picture[[0, 0, -1, -1], [0, -1, 0, -1], 3].any()
    assert png_of(draw_charts([rank_chart("loss", {})]))[0].startswith(b"\x89PNG")


NAMES = ["", "$x^2_1$", "$\\frac{", "a_b^c", "two\nlines\x00\x1b[31m", "\ud800", "\u4e2d\u6587"]


@pytest.mark.parametrize("name", [*NAMES, "W" * 9999])
def test_any_metric_name_is_drawn_literally(name: str) -> None:
    figure = draw_charts([chart(name)])
    assert png_of(figure)[0].startswith(b"\x89PNG")
    assert len(figure.axes[0].get_title("left")) < 60
    assert printable_name(" loss\r\n\u4e2d\u202e x ") == "loss \N{REPLACEMENT CHARACTER} x"


@pytest.mark.process
def test_metrics_need_no_numpy_and_a_thread_can_draw_charts_without_pyplot() -> None:
    program = f"""
import sys, threading
{imported(record_metrics, palette, axes, sparkline)}
assert not {{"numpy", "matplotlib", "PIL"}} & set(sys.modules)
{imported(MetricStore, rank_chart, draw_charts, png_of)}
metrics, drawn = MetricStore(), []
metrics.add(0, 0.0, 0, {{"loss": 1.0}})
charts = [rank_chart("loss", metrics.curves("loss"))]
thread = threading.Thread(target=lambda: drawn.append(png_of(draw_charts(charts))[0]))
thread.start()
thread.join()
assert drawn[0].startswith(b"\\x89PNG")
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_styles_of_users_do_not_reach_the_charts_and_stay_as_they_are() -> None:
    plain = png_of(draw_charts([chart("$loss$")]))
    theirs: dict[Any, Any] = {
        "axes.facecolor": "black",
        "figure.dpi": 30,
        "lines.marker": "x",
        "savefig.bbox": "tight",
        "text.usetex": True,
    }
    with mpl.rc_context(theirs):
        assert png_of(draw_charts([chart("$loss$")])) == plain
        assert {key: mpl.rcParams[key] for key in theirs} == theirs


def test_values_that_are_not_finite_are_marked_in_red() -> None:
    lost = rank_chart("loss", losses(lambda _r, s: np.nan if 40 <= s < 60 else 1.0))
    [ax] = draw_charts([lost]).axes
    [span] = ax.patches
    assert span.get_window_extent().width > 0
    assert ax.get_title("right") == "20 values not finite"
