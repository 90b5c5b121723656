"""The chart of a metric: a true picture, whatever was reported and however it was named."""

from __future__ import annotations

import io
import math
import subprocess
import sys
import threading
from collections.abc import Mapping

import matplotlib as mpl
import numpy as np
import pytest
from drivers.inside import imported
from hypothesis import given, settings
from hypothesis import strategies as st
from losses import losses
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from numpy.typing import NDArray

from nbddp.charts import palette
from nbddp.charts.palette import rank_color
from nbddp.record import metrics as metrics_module
from nbddp.record.metrics import Curve, MetricStore
from nbddp.ui.charts import scale
from nbddp.ui.charts.drawing import ALERT, INK, RESTART, Chart
from nbddp.ui.charts.frame import HEIGHT, WIDTH
from nbddp.ui.charts.paper import HEAD, SCALE, draw_png, readable

Picture = NDArray[np.float64]
Marks = NDArray[np.bool_]

MARGIN = 50 * SCALE  # pixels on the left and the bottom that belong to the axes
WHOLE = 280 * SCALE  # pixels from one end of the axes to the other, and a few less


def picture_of(curves: Mapping[int, Curve], name: str = "loss") -> Picture:
    return np.asarray(imread(io.BytesIO(draw_png(name, curves))), dtype=np.float64)


def plot_of(curves: Mapping[int, Curve]) -> Picture:
    """What is inside the axes."""
    return picture_of(curves)[(HEAD + 12) * SCALE : -26 * SCALE, MARGIN:]


def where(picture: Picture, color: str, *, alpha: float = 0.9) -> Marks:
    """The pixels that are of a colour, and opaque."""
    near = np.abs(picture[..., :3] - to_rgb(color)).max(axis=-1) < 0.06
    return near & (picture[..., 3] >= alpha)


def heights(marks: Marks) -> list[float]:
    """How far up the marked pixels are, from left to right, where there are any."""
    return [len(marks) - float(np.mean(np.flatnonzero(each))) for each in marks.T if each.any()]


def upright(marks: Marks, *, least: int) -> int:
    """How many upright lines there are among the marks."""
    is_line = marks.sum(axis=0) >= least
    return int(np.count_nonzero(np.diff(is_line.astype(int), prepend=0) == 1))


def falling(rank: int, step: int) -> float:
    return 2.0 - step / 60 + 0.05 * rank


def magnitudes(_rank: int, step: int) -> float:
    return 10.0 ** (-step / 20)


# ---- the picture


def test_a_chart_is_a_small_transparent_png_of_the_right_size() -> None:
    png = draw_png("loss", losses(falling, ranks=4))
    picture = picture_of(losses(falling, ranks=4))
    assert png.startswith(b"\x89PNG")
    assert len(png) < 20_000
    assert picture.shape == ((HEIGHT + HEAD) * SCALE, WIDTH * SCALE, 4)
    assert (picture[..., 3] == 0).mean() > 0.8
    assert picture[[0, 0, -1, -1], [0, -1, 0, -1], 3].tolist() == [0, 0, 0, 0]
    assert picture_of({}).shape == picture.shape
    assert not plot_of({})[..., 3].any()


def test_a_single_rank_is_one_line_in_its_colour() -> None:
    plot = plot_of({5: losses(falling)[0]})
    line = heights(where(plot, rank_color(5)))
    assert len(line) > WHOLE
    assert line[0] > line[len(line) // 2] > line[-1]
    assert not where(plot, INK).any()


def test_several_ranks_are_faint_lines_and_a_strong_one_between_them() -> None:
    plot = plot_of(losses(lambda rank, _step: float(rank), ranks=3))
    assert not any(where(plot, rank_color(rank)).any() for rank in (0, 1, 2))
    low, high = (where(plot, rank_color(rank), alpha=0.3) for rank in (0, 2))
    mean = heights(where(plot, INK))
    assert max(heights(low)) < min(mean) <= max(mean) < min(heights(high))
    assert len(mean) > WHOLE


def test_the_mean_of_ranks_that_are_not_at_the_same_step() -> None:
    def mean(curves: Mapping[int, Curve]) -> list[float]:
        strong = Chart.of("loss", curves).strong
        assert strong is not None
        return strong.values.tolist()

    def one_of(steps: int) -> dict[int, Curve]:
        return {0: losses(lambda _rank, _step: 0.0)[0], 1: losses(lambda *_: 4.0, steps=steps)[0]}

    assert mean(one_of(40)) == [2.0] * 40 + [0.0] * 60, "it goes on without one that was lost"
    assert mean(one_of(98)) == [2.0] * 98, "it waits for one that lags a little"
    lost = losses(lambda rank, step: math.nan if rank and step > 50 else 1.0, ranks=2)
    assert [math.isnan(each) for each in mean(lost)] == [False] * 51 + [True] * 49, "not hidden"
    by_turns = MetricStore()
    for step in range(100):
        by_turns.add(step % 2, 0.0, step, {"loss": 10.0 * (step % 2)})
    assert set(mean(by_turns.curves("loss"))[1:]) == {5.0}


def test_a_spike_among_very_many_points_is_seen() -> None:
    spiky = losses(lambda _rank, step: 9.0 if step == 2_000 else 1.0, steps=5_000)
    assert where(plot_of(spiky), rank_color(0), alpha=0.05)[: 50 * SCALE].any()


def test_a_point_without_neighbours_is_a_dot() -> None:
    marks = where(plot_of(losses(falling, steps=1)), rank_color(0))
    assert 3 * SCALE <= marks.any(axis=0).sum() <= 6 * SCALE
    assert 3 * SCALE <= marks.any(axis=1).sum() <= 6 * SCALE
    between_gaps = losses(lambda _rank, step: 1.0 if step == 50 else math.nan)
    assert where(plot_of(between_gaps), rank_color(0)).sum() > 10


# ---- attempts that go on


def test_where_an_attempt_went_on_is_a_mark_of_its_own() -> None:
    metrics = MetricStore()
    for step in range(50):
        metrics.add(0, 0.0, step, {"loss": 1.0})
    metrics.resume()
    for step in range(30, 100):
        metrics.add(0, 0.0, step, {"loss": 1.0})
    plot = plot_of(metrics.curves("loss"))
    assert upright(where(plot, RESTART, alpha=0.8), least=200) == 1
    assert len(heights(where(plot, rank_color(0)))) > WHOLE - 10 * SCALE


# ---- values that are not finite, and scales


def test_values_that_are_not_finite_are_gaps_with_a_red_mark() -> None:
    picture = picture_of(losses(lambda _rank, step: math.inf if 40 <= step < 60 else 1.0))
    line = where(picture[(HEAD + 12) * SCALE : -26 * SCALE, MARGIN:], rank_color(0))
    columns = np.flatnonzero(line.any(axis=0))
    marked = where(picture, ALERT)[:, MARGIN:].any(axis=0)
    widest = np.diff(columns).argmax()
    begin, end = columns[widest], columns[widest + 1]
    assert end - begin == pytest.approx(0.2 * len(marked), rel=0.1)
    assert marked[begin + 10 : end - 10].all()
    assert not marked[10 : begin - 10].any()


def test_only_a_chart_of_values_that_are_not_finite_has_red() -> None:
    assert not where(picture_of(losses(falling, ranks=2)), ALERT, alpha=0.05).any()
    one = losses(lambda _rank, step: math.nan if step == 700 else 1.0, steps=5_000)
    assert where(picture_of(one), ALERT).any()
    assert where(picture_of(losses(lambda *_: math.nan, ranks=2)), ALERT).any()


def test_values_of_many_magnitudes_are_drawn_on_a_logarithmic_scale_that_says_so() -> None:
    line = heights(where(plot_of(losses(magnitudes)), rank_color(0)))
    quarter = len(line) // 4
    assert line[0] - line[quarter] == pytest.approx(line[quarter] - line[2 * quarter], rel=0.05)
    corner = np.s_[: 24 * SCALE, -40 * SCALE :, 3]
    assert picture_of(losses(magnitudes))[corner].any()
    assert not picture_of(losses(falling))[corner].any()


def test_one_value_at_zero_makes_the_scale_linear_whatever_the_mean_is() -> None:
    metrics = MetricStore()
    for step in range(100):
        metrics.add(0, 0.0, step, {"loss": magnitudes(0, step)})
    assert Chart.of("loss", metrics.curves("loss")).frame.is_log
    metrics.add(0, 0.0, 99, {"loss": 0.0})  # the mean of the step stays above it
    assert not Chart.of("loss", metrics.curves("loss")).frame.is_log


# ---- whatever may come


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.integers(0, 20),
        st.lists(st.tuples(st.integers(), st.floats()), min_size=1, max_size=12),
        max_size=3,
    ),
    st.text(max_size=30),
)
def test_no_data_and_no_name_stop_a_chart(
    points: dict[int, list[tuple[int, float]]], name: str
) -> None:
    metrics = MetricStore()
    for rank, each in points.items():
        for step, value in each:
            metrics.add(rank, 0.0, step, {"loss": value})
    assert draw_png(name, metrics.curves("loss")).startswith(b"\x89PNG")


NAMES = [
    "",
    "$",
    "$x^2_1$",
    "$\\frac{",
    "a_b^c",
    "two\nlines\x00\x1b[31m",
    "\ud800",
    "\u4e2d\u6587",
]


@pytest.mark.parametrize("name", [*NAMES, "W" * 9999])
def test_a_name_is_drawn_letter_by_letter_whatever_it_is(name: str) -> None:
    picture = picture_of(losses(falling), name=name)
    assert not picture[:, : 5 * SCALE, 3].any()
    assert not picture[:, -2 * SCALE :, 3].any()


def test_a_chart_shows_its_name_its_values_and_nothing_else() -> None:
    curves, others = losses(falling), losses(lambda _rank, step: 2 * falling(0, step))
    plain = draw_png("loss", curves)
    assert draw_png("loss", curves) == plain
    assert draw_png("loss", others) != plain
    assert draw_png("$loss$", curves) != plain, "it is no formula"
    ends = [draw_png("W" * length, curves) for length in (60, 61, 200)]
    assert ends[0] == ends[1] == ends[2]
    assert ends[0] != draw_png("W" * 60, others), "there is room for the value"
    assert readable(" loss\r\n\u4e2d\u202e x ") == "loss \N{REPLACEMENT CHARACTER} x"


# ---- threads, styles, and what is loaded


@pytest.mark.process
def test_the_metrics_load_no_numpy_and_a_thread_may_draw_without_pyplot() -> None:
    program = f"""
import sys, threading
{imported(metrics_module, palette, scale)}
assert not {{"numpy", "matplotlib", "PIL"}} & set(sys.modules)
{imported(MetricStore, draw_png)}
metrics, drawn = MetricStore(), []
metrics.add(0, 0.0, 0, {{"loss": 1.0}})
thread = threading.Thread(target=lambda: drawn.append(draw_png("loss", metrics.curves("loss"))))
thread.start()
thread.join()
assert drawn[0].startswith(b"\\x89PNG")
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_several_threads_draw_the_same() -> None:
    curves, drawn = losses(falling, ranks=3), list[bytes]()
    threads = [
        threading.Thread(target=lambda: drawn.append(draw_png("loss", curves))) for _ in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drawn == [draw_png("loss", curves)] * 4


def test_the_styles_of_users_do_not_reach_the_charts() -> None:
    curves = losses(falling, ranks=2)
    plain = draw_png("$loss$", curves)
    theirs = {
        "axes.facecolor": "black",
        "figure.autolayout": True,
        "figure.dpi": 30,
        "font.family": "Comic Sans MS",
        "lines.linestyle": ":",
        "lines.marker": "x",
        "savefig.bbox": "tight",
        "text.color": "red",
        "text.usetex": True,
    }
    with mpl.rc_context(theirs):
        assert draw_png("$loss$", curves) == plain
