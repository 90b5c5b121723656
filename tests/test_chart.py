"""The chart of a metric: a true picture, whatever was reported and however it was named."""

from __future__ import annotations

import io
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

import matplotlib as mpl
import numpy as np
import pytest
from drivers.inside import imported
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from numpy.typing import NDArray

from nbddp.record import curves
from nbddp.record.curves import Curves
from nbddp.record.series import Curve
from nbddp.ui import palette
from nbddp.ui.charts import scale
from nbddp.ui.charts.drawing import ALERT, INK, RESTART
from nbddp.ui.charts.frame import HEIGHT, WIDTH
from nbddp.ui.charts.paper import HEAD, SCALE, draw_png, readable
from nbddp.ui.palette import rank_color

Picture = NDArray[np.float64]
Value = Callable[[int, int], float]

MARGIN = 50 * SCALE  # pixels on the left and the bottom that belong to the axes


def curves_of(value: Value, *, ranks: int = 1, steps: int = 100) -> dict[int, Curve]:
    metrics = Curves()
    for step in range(steps):
        for rank in range(ranks):
            metrics.add(rank, 0.0, step, {"loss": value(rank, step)})
    return metrics.curves("loss")


def picture_of(curves: Mapping[int, Curve], name: str = "loss") -> Picture:
    return np.asarray(imread(io.BytesIO(draw_png(name, curves))), dtype=np.float64)


def where(picture: Picture, color: str, *, alpha: float = 0.9) -> NDArray[np.bool_]:
    """The pixels that are of a colour, and opaque."""
    near = np.abs(picture[..., :3] - to_rgb(color)).max(axis=-1) < 0.06
    return near & (picture[..., 3] >= alpha)


def plot_of(picture: Picture) -> Picture:
    """What is inside the axes."""
    return picture[(HEAD + 12) * SCALE : -26 * SCALE, MARGIN:]


def heights(marks: NDArray[np.bool_]) -> list[float]:
    """How far up the marked pixels are, from left to right, where there are any."""
    return [len(marks) - float(np.mean(np.flatnonzero(each))) for each in marks.T if each.any()]


def falling(rank: int, step: int) -> float:
    return 2.0 - step / 60 + 0.05 * rank


# ---- the picture


def test_a_chart_is_a_small_transparent_png_of_the_right_size() -> None:
    png = draw_png("loss", curves_of(falling, ranks=4))
    picture = picture_of(curves_of(falling, ranks=4))
    assert png.startswith(b"\x89PNG")
    assert len(png) < 20_000
    assert picture.shape == ((HEIGHT + HEAD) * SCALE, WIDTH * SCALE, 4)
    assert (picture[..., 3] == 0).mean() > 0.8
    assert picture[[0, 0, -1, -1], [0, -1, 0, -1], 3].tolist() == [0, 0, 0, 0]


def test_the_same_data_give_the_same_bytes_and_other_data_do_not() -> None:
    one, other = curves_of(falling), curves_of(lambda _rank, step: float(step))
    assert draw_png("loss", one) == draw_png("loss", one)
    assert draw_png("loss", one) != draw_png("loss", other)
    assert draw_png("loss", one) != draw_png("accuracy", one)


def test_a_single_rank_is_one_line_in_its_colour() -> None:
    plot = plot_of(picture_of({5: curves_of(falling)[0]}))
    line = heights(where(plot, rank_color(5)))
    assert len(line) > 280 * SCALE
    assert line[0] > line[len(line) // 2] > line[-1]
    assert not where(plot, INK).any()


def test_several_ranks_are_faint_lines_and_a_strong_one_between_them() -> None:
    plot = plot_of(picture_of(curves_of(lambda rank, _step: float(rank), ranks=3)))
    assert not any(where(plot, rank_color(rank)).any() for rank in (0, 1, 2))
    low, high = (where(plot, rank_color(rank), alpha=0.3) for rank in (0, 2))
    mean = heights(where(plot, INK))
    assert max(heights(low)) < min(mean) <= max(mean) < min(heights(high))
    assert len(mean) > 280 * SCALE


def test_the_mean_goes_on_without_a_rank_that_was_lost() -> None:
    curves = curves_of(lambda rank, _step: 4.0 * rank, ranks=2)
    curves[1] = curves_of(lambda _rank, _step: 4.0, steps=40)[0]
    mean = heights(where(plot_of(picture_of(curves)), INK))
    assert len(mean) > 280 * SCALE
    assert mean[10] - mean[-10] == pytest.approx(mean[10] - min(mean), abs=2)
    assert mean[10] > mean[-10] + 50


def test_the_mean_is_between_ranks_that_report_at_different_steps() -> None:
    metrics = Curves()
    for step in range(100):
        metrics.add(step % 2, 0.0, step, {"loss": 10.0 * (step % 2)})
    mean = heights(where(plot_of(picture_of(metrics.curves("loss"))), INK))
    middle = mean[10:-10]
    assert max(middle) - min(middle) < 3


def test_the_end_of_the_mean_waits_for_a_rank_that_lags_a_little() -> None:
    curves = curves_of(lambda rank, _step: 4.0 * rank, ranks=2)
    curves[1] = curves_of(lambda _rank, _step: 4.0, steps=98)[0]
    mean = heights(where(plot_of(picture_of(curves)), INK))
    assert max(mean) - min(mean) < 3


def test_a_spike_among_very_many_points_is_seen() -> None:
    spiky = curves_of(lambda _rank, step: 9.0 if step == 7_000 else 1.0, steps=20_000)
    assert where(plot_of(picture_of(spiky)), rank_color(0), alpha=0.05)[: 50 * SCALE].any()


def test_a_single_point_is_a_dot() -> None:
    marks = where(plot_of(picture_of(curves_of(falling, steps=1))), rank_color(0))
    assert 3 * SCALE <= marks.any(axis=0).sum() <= 6 * SCALE
    assert 3 * SCALE <= marks.any(axis=1).sum() <= 6 * SCALE


def test_a_point_between_gaps_is_a_dot() -> None:
    curves = curves_of(lambda _rank, step: 1.0 if step == 50 else math.nan)
    assert where(plot_of(picture_of(curves)), rank_color(0)).sum() > 10


def test_no_curves_are_an_empty_chart() -> None:
    picture = picture_of({})
    assert picture.shape == ((HEIGHT + HEAD) * SCALE, WIDTH * SCALE, 4)
    assert not plot_of(picture)[..., 3].any()


# ---- loops that begin again, attempts that go on


def loops(count: int, *, steps: int = 20) -> Curves:
    metrics = Curves()
    for number in range(count):
        for step in range(steps):
            metrics.add(0, 0.0, step, {"loss": 1.0 + number})
    return metrics


def test_loops_that_begin_again_stand_side_by_side_and_all_stay_visible() -> None:
    line = heights(where(plot_of(picture_of(loops(3).curves("loss"))), rank_color(0)))
    assert len(line) > 280 * SCALE
    third = len(line) // 3
    means = [float(np.mean(line[at + 20 : at + third - 20])) for at in (0, third, 2 * third)]
    assert means[0] < means[1] - 50 < means[2] - 100


def columns(marks: NDArray[np.bool_], *, least: int) -> int:
    """How many upright lines there are among the marks."""
    is_line = marks.sum(axis=0) >= least
    return int(np.count_nonzero(np.diff(is_line.astype(int), prepend=0) == 1))


def test_where_a_loop_begins_again_is_a_mark_unless_there_are_too_many() -> None:
    for count, marks in ((1, 0), (3, 2), (60, 0)):
        plot = plot_of(picture_of(loops(count, steps=10).curves("loss")))
        faint = where(plot, INK, alpha=0.7)
        assert columns(faint, least=60) == marks


def test_where_an_attempt_went_on_is_a_mark_of_its_own() -> None:
    metrics = loops(1, steps=50)
    metrics.take_up()
    for step in range(30, 100):
        metrics.add(0, 0.0, step, {"loss": 1.0})
    plot = plot_of(picture_of(metrics.curves("loss")))
    assert columns(where(plot, RESTART, alpha=0.8), least=200) == 1
    assert len(heights(where(plot, rank_color(0)))) > 270 * SCALE


# ---- values that are not finite


def test_values_that_are_not_finite_are_gaps_with_a_red_mark() -> None:
    curves = curves_of(lambda _rank, step: math.inf if 40 <= step < 60 else 1.0)
    picture = picture_of(curves)
    columns = np.flatnonzero(where(plot_of(picture), rank_color(0)).any(axis=0))
    marked = where(picture, ALERT)[:, MARGIN:].any(axis=0)
    widest = np.diff(columns).argmax()
    begin, end = columns[widest], columns[widest + 1]
    assert end - begin == pytest.approx(0.2 * len(marked), rel=0.1)
    assert marked[begin + 10 : end - 10].all()
    assert not marked[10 : begin - 10].any()


def test_a_chart_of_finite_values_has_no_red() -> None:
    assert not where(picture_of(curves_of(falling, ranks=2)), ALERT, alpha=0.05).any()


def test_one_nan_among_very_many_points_is_marked() -> None:
    curves = curves_of(lambda _rank, step: math.nan if step == 700 else 1.0, steps=5_000)
    assert where(picture_of(curves), ALERT).any()


def test_nothing_but_nan_is_a_chart_too() -> None:
    assert where(picture_of(curves_of(lambda _rank, _step: math.nan, ranks=2)), ALERT).any()


def test_a_nan_of_one_rank_is_not_hidden_by_the_mean_of_the_others() -> None:
    curves = curves_of(lambda rank, step: math.nan if rank and step > 50 else 1.0, ranks=2)
    plot = plot_of(picture_of(curves))
    assert where(plot, INK)[:, : plot.shape[1] // 3].any()
    assert not where(plot, INK)[:, plot.shape[1] * 2 // 3 :].any()


# ---- the scale


def test_values_of_many_magnitudes_are_drawn_on_a_logarithmic_scale() -> None:
    plot = plot_of(picture_of(curves_of(lambda _rank, step: 10.0 ** (-step / 20))))
    line = heights(where(plot, rank_color(0)))
    quarter = len(line) // 4
    assert line[0] - line[quarter] == pytest.approx(line[quarter] - line[2 * quarter], rel=0.05)


def test_a_logarithmic_scale_says_so() -> None:
    corner = np.s_[: 24 * SCALE, -40 * SCALE :, 3]
    curves = curves_of(lambda _rank, step: 10.0 ** (-step / 20))
    assert picture_of(curves)[corner].any()
    assert not picture_of(curves_of(falling))[corner].any()


def test_one_value_at_zero_makes_the_scale_linear_whatever_the_mean_is() -> None:
    metrics = Curves()
    for step in range(100):
        metrics.add(0, 0.0, step, {"loss": 10.0 ** (-step / 20)})
    metrics.add(0, 0.0, 99, {"loss": 0.0})  # the mean of the step stays above it
    picture_of(metrics.curves("loss"))


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
    metrics = Curves()
    for rank, each in points.items():
        for step, value in each:
            metrics.add(rank, 0.0, step, {"loss": value})
    assert draw_png(name, metrics.curves("loss")).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "$",
        "$x^2_1$",
        "$\\frac{",
        "a_b^c",
        "two\nlines\x00\x1b[31m",
        "\ud800",
        "\u4e2d\u6587",
        "W" * 9999,
    ],
)
def test_a_name_is_drawn_letter_by_letter_whatever_it_is(name: str) -> None:
    picture = picture_of(curves_of(falling), name=name)
    assert not picture[:, : 5 * SCALE, 3].any()
    assert not picture[:, -2 * SCALE :, 3].any()


def test_a_name_with_dollars_is_no_formula() -> None:
    curves = curves_of(falling)
    assert draw_png("$a$", curves) != draw_png("a", curves)


def test_a_long_name_leaves_room_for_the_value() -> None:
    curves = curves_of(falling)
    ends = [draw_png("W" * length, curves) for length in (60, 61, 200)]
    assert ends[0] == ends[1] == ends[2]
    assert ends[0] != draw_png("W" * 60, curves_of(lambda _rank, step: 2 * falling(0, step)))


def test_letters_that_the_font_does_not_have_are_marked() -> None:
    assert readable(" loss\r\n\u4e2d\u202e x ") == "loss \N{REPLACEMENT CHARACTER} x"


# ---- threads, styles, and what is loaded


@pytest.mark.process
def test_a_thread_may_draw_and_pyplot_is_not_loaded() -> None:
    program = (
        imported(Curves, draw_png)
        + """
import sys, threading
metrics, drawn = Curves(), []
metrics.add(0, 0.0, 0, {"loss": 1.0})
thread = threading.Thread(target=lambda: drawn.append(draw_png("loss", metrics.curves("loss"))))
thread.start()
thread.join()
assert drawn[0].startswith(b"\\x89PNG")
assert "matplotlib.pyplot" not in sys.modules
"""
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_several_threads_draw_the_same() -> None:
    curves, drawn = curves_of(falling, ranks=3), list[bytes]()
    threads = [
        threading.Thread(target=lambda: drawn.append(draw_png("loss", curves))) for _ in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drawn == [draw_png("loss", curves)] * 4


def test_the_styles_of_users_do_not_reach_the_charts() -> None:
    curves = curves_of(falling, ranks=2)
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


@pytest.mark.process
def test_the_metrics_load_neither_numpy_nor_matplotlib() -> None:
    program = (
        f"import sys\n{imported(curves, palette, scale)}"
        "assert not {'numpy', 'matplotlib', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# ---- colours


def luminance(color: str) -> float:
    parts = (np.array(to_rgb(color)) + 0.055) / 1.055
    return float(parts**2.4 @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_eight_ranks_have_eight_colours_and_then_they_repeat() -> None:
    assert rank_color(0) == "#5f87ff"
    assert len({rank_color(rank) for rank in range(8)}) == 8
    assert rank_color(8) == rank_color(0)


@pytest.mark.parametrize("page", ["#ffffff", "#111111"])
def test_text_and_lines_are_read_on_a_white_and_on_a_dark_page(page: str) -> None:
    assert contrast(INK, page) > 4
    assert contrast(ALERT, page) > 3.5
    assert min(contrast(rank_color(rank), page) for rank in range(8)) > 2.5
