"""The values of a chart: its lines, its axes, and the text next to it."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from losses import counting, falling, losses, steep

from nbddp.charts.axes import AxisScale, format_number, format_ticks, log_ticks, round_ticks
from nbddp.charts.chart_lines import Chart, rank_chart
from nbddp.charts.svg import Frame, draw
from nbddp.record.metrics import Curve, MetricStore
from nbddp.ui.chart_html import tooltips_of


def chart_of(value: Callable[[int, int], float], **how: int) -> Chart:
    return rank_chart("loss", losses(value, **how))


def svg_of(chart: Chart) -> str:
    return draw(chart, Frame(chart)).inline("")


def labels(chart: Chart) -> list[str]:
    return [line.label for line in chart.drawn]


# ---- which lines


def test_several_ranks_have_one_line_each_and_a_bold_line_for_their_mean() -> None:
    chart = chart_of(lambda rank, _step: float(rank), ranks=3)
    assert labels(chart) == ["rank 0", "rank 1", "rank 2", "mean"]
    assert [line.is_strong for line in chart.drawn] == [False, False, False, True]
    assert chart.legend == "mean of 3 ranks"
    assert set(chart.drawn[-1].values.tolist()) == {1.0}
    assert not chart.drawn[-1].has_band


def test_more_than_8_ranks_are_drawn_as_a_band_with_the_lowest_and_the_highest_rank() -> None:
    chart = chart_of(lambda rank, step: (rank * 5 % 12) + step / 100, ranks=12)
    assert labels(chart) == ["rank 0", "rank 7", "mean"]
    assert chart.drawn[-1].low.min() == 0.0
    assert chart.drawn[-1].high.max() == pytest.approx(11.99)
    lost = chart_of(lambda rank, _step: math.nan if rank < 11 else 1.0, ranks=12)
    assert labels(lost) == ["rank 11", "mean"]
    assert labels(chart_of(lambda *_: math.nan, ranks=12)) == ["mean"]


def test_the_mean_line_of_ranks_at_different_steps() -> None:
    def mean(curves: dict[int, Curve]) -> list[float]:
        strong = rank_chart("loss", curves).drawn[-1]
        assert strong is not None
        return strong.values.tolist()

    def one_of(steps: int) -> dict[int, Curve]:
        return {0: losses(lambda *_: 0.0)[0], 1: losses(lambda *_: 4.0, steps=steps)[0]}

    assert mean(one_of(40)) == [2.0] * 40 + [0.0] * 60, "it goes on without one that was lost"
    assert mean(one_of(98)) == [2.0] * 98, "it waits for one that lags a little"
    lost = losses(lambda rank, step: math.nan if rank and step > 50 else 1.0, ranks=2)
    assert [math.isnan(each) for each in mean(lost)] == [False] * 51 + [True] * 49, "not hidden"
    by_turns = MetricStore()
    for step in range(100):
        by_turns.add(step % 2, 0.0, step, {"loss": 10.0 * (step % 2)})
    assert set(mean(by_turns.curves("loss"))[1:]) == {5.0}


def test_a_spike_is_inside_the_band_and_a_lone_point_is_a_dot() -> None:
    chart = chart_of(lambda _rank, step: 9.0 if step == 2_000 else 1.0, steps=5_000)
    [drawn] = chart.curves()
    assert len(drawn.steps) <= 161
    assert np.nanmax(drawn.high) == 9.0
    [alone] = chart_of(lambda _r, s: 1.0 if s in (10, 50, 51) else math.nan).drawn
    assert np.flatnonzero(alone.dots).tolist() == [10, 50, 51], "few points all are dots"
    [most] = chart_of(lambda _r, s: math.nan if s in (49, 51) else 1.0).drawn
    assert np.flatnonzero(most.dots).tolist() == [50]


def test_the_step_at_which_an_attempt_resumed_is_marked() -> None:
    metrics = MetricStore()
    for step in range(50):
        metrics.add(0, 0.0, step, {"loss": 1.0})
    metrics.resume()
    for step in range(30, 100):
        metrics.add(0, 0.0, step, {"loss": 1.0})
    chart = rank_chart("loss", metrics.curves("loss"))
    assert [mark.at for mark in chart.marks] == [30.0]
    assert "#d9822b" in svg_of(chart)


# ---- values that are not finite, and the axis


def test_values_that_are_not_finite_are_counted_and_marked() -> None:
    chart = chart_of(lambda _rank, step: math.inf if 40 <= step < 60 else 1.0)
    assert chart.facts == ["20 values not finite"]
    assert svg_of(chart).count("#dd4444") == 2
    assert "#dd4444" not in svg_of(chart_of(falling))


@pytest.mark.parametrize(
    ("value", "scale", "is_log"),
    [
        (counting, AxisScale.AUTO, False),
        (counting, AxisScale.LOG, True),
        (lambda _rank, step: float(-step), AxisScale.LOG, False),
        (steep, AxisScale.AUTO, True),
        (steep, AxisScale.LINEAR, False),
        (lambda *_: 0.0, AxisScale.LOG, False),
        (lambda _rank, step: min(step, 20) / 20, AxisScale.AUTO, False),
    ],
    ids=["flat", "asked", "negative", "steep", "not asked", "zeros alone", "a warm-up from 0"],
)
def test_the_requested_axis_scale_is_used_if_the_values_allow_it(
    value: Callable[[int, int], float], scale: AxisScale, is_log: bool
) -> None:
    assert rank_chart("loss", losses(value), scale).is_log == is_log


def from_zero(_rank: int, step: int) -> float:
    return step % 700 / 700


@pytest.mark.parametrize("steps", [700, 1400, 2800])  # above 1,000 a bucket has several values
def test_a_metric_with_a_zero_gets_no_log_axis_however_often_its_cell_ran(steps: int) -> None:
    curves = losses(from_zero, steps=steps)
    assert not rank_chart("accuracy", curves).is_log
    assert rank_chart("accuracy", curves, AxisScale.LOG).is_log


@pytest.mark.parametrize(
    ("last", "why"), [(1e301, "too large to draw"), (math.inf, "not finite"), (1.0, "not finite")]
)
def test_values_that_are_finite_but_too_large_are_called_so(last: float, why: str) -> None:
    chart = chart_of(lambda _rank, step: 2e300 if step < 99 else last)
    assert chart.facts[0].endswith(f" values {why}")
    assert f"rank 0  {why}" in next(tooltips_of(chart, Frame(chart))).text


def test_a_log_axis_omits_a_zero_value() -> None:
    zero_last = losses(lambda rank, step: 0.0 if step == 99 else steep(rank, step))
    chart = rank_chart("loss", zero_last, AxisScale.LOG)
    assert chart.is_log
    assert chart.facts == ["log scale, zeros left out"]
    assert chart.limits == (pytest.approx(10 ** (-98 / 20)), 1.0)
    [drawn] = chart.curves()
    assert math.isnan(drawn.values[-1])
    assert math.isnan(drawn.low[-1]), "no band that goes down to the bottom"
    assert np.isfinite(drawn.values[:-1]).all()
    assert chart_of(steep).facts == ["log scale"]


def test_a_smoothed_line_averages_values_or_logarithms_and_keeps_gaps() -> None:
    [line] = chart_of(lambda _r, s: math.nan if s == 50 else s % 2).drawn
    smooth = line.smoothed(99.0)
    assert smooth[0] == 0.0
    assert math.isnan(smooth[50])
    assert all(0.2 < value < 0.8 for value in smooth[60:])

    def deep(_rank: int, step: int) -> float:
        return 10.0 ** (-step / 3 - 2 * (step % 2))

    chart = chart_of(deep)
    [drawn] = chart.curves()
    away = drawn.smoothed(chart.span) - drawn.values
    assert np.abs(away).max() < 2.5, "magnitudes; the mean of values lies 12 above the last ones"


# ---- ticks


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9))
def test_ticks_are_few_distinct_and_within_the_limits(low: float, span: float) -> None:
    high = low + max(span, abs(low) * 1e-9)
    ticks = round_ticks(low, high)
    gap = 1e-9 * max(abs(low), abs(high))
    assert 1 <= len(ticks) <= 5
    assert all(low - gap <= tick <= high + gap for tick in ticks)
    assert len(set(format_ticks(ticks))) == len(ticks)


@given(st.floats(-300, 260), st.floats(0.1, 40))
def test_log_ticks_are_few_and_within_the_limits(low: float, span: float) -> None:
    ticks = log_ticks(low, low + span)
    assert 1 <= len(ticks) <= 6
    assert all(low - 1e-6 <= math.log10(tick) <= low + span + 1e-6 for tick in ticks)


@given(st.floats(-1e300, 1e300))
def test_tick_labels_are_short_and_nearly_exact(value: float) -> None:
    text = format_number(value)
    assert len(text) <= 11
    assert float(text) == pytest.approx(value, rel=1e-3)


# ---- any input


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.integers(0, 20),
        st.lists(st.tuples(st.integers(), st.floats()), min_size=1, max_size=12),
        max_size=12,
    ),
    st.sampled_from(AxisScale),
)
@example({0: [(2**53, 0.0), (0, 0.0), (2, 0.0)]}, AxisScale.AUTO)
def test_any_data_can_be_drawn_as_a_chart(
    points: dict[int, list[tuple[int, float]]], scale: AxisScale
) -> None:
    metrics = MetricStore()
    for rank, of_rank in points.items():
        for step, value in of_rank:
            metrics.add(rank, 0.0, step, {"loss": value})
    chart = rank_chart("loss", metrics.curves("loss"), scale)
    drawing = draw(chart, Frame(chart))
    assert drawing.picture().endswith("</svg>")
    assert not {"nan", "inf"} & set(drawing.inline("").replace('"', " ").split())
