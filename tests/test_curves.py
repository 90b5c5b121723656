"""The metrics: any number of reports becomes curves that fit, and nothing that matters is lost."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traced import keeps_less_than

from nbddp.record.curves import MAX_DROPPED, MAX_NAME, MAX_NAMES, Curves, Pace
from nbddp.record.series import MAX_BUCKETS, MAX_MARKS, Curve

Points = Iterable[tuple[float | None, float]]


def reported(*attempts: Points) -> Curves:
    """The losses that rank 0 reported, in one attempt after the other."""
    metrics = Curves()
    for number, points in enumerate(attempts):
        if number:
            metrics.take_up()
        for step, value in points:
            metrics.add(0, 0.0, step, {"loss": value})
    return metrics


def curve_of(*attempts: Points) -> Curve:
    return reported(*attempts).curves("loss")[0]


# ---- curves


def test_what_is_reported_is_kept_by_name_and_rank() -> None:
    metrics = Curves()
    metrics.add(1, 0.0, 0, {"loss": 2.0, "accuracy": 0.1})
    metrics.add(0, 0.0, 0, {"loss": 3.0})
    metrics.add(0, 0.0, 1, {"loss": 1.0})
    assert metrics.names() == ["loss", "accuracy"]
    assert list(metrics.curves("loss")) == [0, 1]
    assert metrics.curves("loss")[0] == Curve(
        steps=(0.0, 1.0), values=(3.0, 1.0), low=(3.0, 1.0), high=(3.0, 1.0), lost=(0, 0), last=1.0
    )
    assert metrics.last("loss") == {0: 1.0, 1: 2.0}
    assert (metrics.curves("nothing"), metrics.last("nothing")) == ({}, {})
    assert reported([(0, 1.0), (1, math.inf)]).last("loss") == {0: math.inf}


CURVES: dict[str, tuple[list[Points], dict[str, Any]]] = {
    "several values of one step": (
        [[(0, 1.0), (0, 3.0), (1, 5.0), (1, 5.0), (1, 8.0)]],
        {"values": (2, 6), "low": (1, 5), "high": (3, 8), "last": 8, "steps": (0, 1)},
    ),
    "any whole number is a step": (
        [[(-(10**400), 1.0), (0, 2.0), (10**400, 3.0), (10**500, 5.0)]],
        {"steps": (-(2.0**53), 0, 2.0**53), "values": (1, 2, 4)},
    ),
    "a loop that begins again": (
        [[(0, 5.0), (1, 4.0), (2, 3.0), (0, 9.0), (1, 8.0), (0, 7.0)]],
        {"values": (5, 4, 3, 9, 8, 7), "begins": (3, 5), "falls": 2, "restarts": ()},
    ),
    "steps that are far apart": (
        [[(step, 1.0) for _ in range(3) for step in (0, 10, 20)]],
        {"steps": (0, 10, 20, 30, 40, 50, 60, 70, 80), "begins": (30, 60)},
    ),
    "a step that counts down": (
        [[(step, step) for step in range(5, 0, -1)]],
        {"steps": (5, 6, 7, 8, 9), "values": (5, 4, 3, 2, 1), "falls": 4},
    ),
    "an attempt that goes on from a checkpoint": (
        [[(0, 5.0), (1, 4.0), (2, math.nan), (3, 2.0)], [(2, 9.0), (3, 8.0)]],
        {"values": (5, 4, 9, 8), "lost": (0, 0, 0, 0), "restarts": (2,), "begins": (), "falls": 0},
    ),
    "an attempt that begins anew": (
        [[(step, 1.0) for step in range(10 * MAX_BUCKETS)], [(0, 2.0), (1, 2.0), (2, 2.0)]],
        {"steps": (0, 1, 2), "restarts": (0,)},
    ),
    "restarts of which a later one went further back": (
        [[(step, 1.0) for step in steps] for steps in (range(6), range(4, 8), (7, 8), (6, 7))],
        {"steps": (0, 1, 2, 3, 4, 5, 6, 7), "restarts": (4, 6)},
    ),
    "an attempt at loops that begin again": (
        [[(0, 5.0), (1, 4.0), (0, 3.0), (1, 2.0)], [(0, 9.0), (1, 8.0), (0, 7.0)]],
        {"values": (5, 4, 3, 2, 9, 8, 7), "begins": (2, 6), "restarts": (4,)},
    ),
    "an attempt that does no step again": (
        [[(0, 5.0), (1, 4.0)], [(2, 3.0), (3, 2.0)]],
        {"steps": (0, 1, 2, 3), "restarts": (2,)},
    ),
    "a count that goes on from a step": (
        [[(7, 1.0), (None, 2.0)], [(None, 3.0)]],
        {"steps": (7, 8, 9), "restarts": (9,), "falls": 0},
    ),
}


@pytest.mark.parametrize(("attempts", "facts"), CURVES.values(), ids=CURVES)
def test_points_become_a_curve(attempts: list[Points], facts: dict[str, Any]) -> None:
    curve = curve_of(*attempts)
    assert {name: getattr(curve, name) for name in facts} == facts


def test_only_points_that_are_more_than_fit_are_put_together_with_their_neighbours() -> None:
    points = [(float(step), math.sin(step)) for step in range(MAX_BUCKETS)]
    curve = curve_of(points)
    assert list(zip(curve.steps, curve.values, strict=True)) == points
    assert curve.low == curve.high == curve.values
    curve = curve_of((step, float(step % 2)) for step in range(MAX_BUCKETS + 1))
    assert curve.steps[:2] == (0.5, 2.5)
    assert (curve.values[0], curve.low[0], curve.high[0]) == (0.5, 0.0, 1.0)
    assert curve.steps[-1] == MAX_BUCKETS


def test_a_spike_among_very_many_points_is_still_seen() -> None:
    curve = curve_of((step, 9.0 if step == 5_432 else 1.0) for step in range(10_000))
    assert max(curve.high) == 9.0
    at = curve.high.index(9.0)
    assert curve.steps[at] == pytest.approx(5_432, abs=20)
    assert curve.low[at] == 1.0 < curve.values[at] < 9.0


@given(
    st.lists(st.floats(width=32) | st.floats(), min_size=1, max_size=50),
    st.integers(min_value=1, max_value=120),
)
def test_whatever_is_reported_lowest_highest_and_lost_are_right(
    values: list[float], times: int
) -> None:
    values = values * times
    curve = curve_of(enumerate(values))
    finite = [value for value in values if abs(value) < 1e300]
    seen = list(zip(curve.low, curve.values, curve.high, strict=True))
    there = [(low, mean, high) for low, mean, high in seen if not math.isnan(mean)]
    assert len(curve.steps) <= MAX_BUCKETS
    assert sum(curve.lost) == len(values) - len(finite)
    assert all(low <= mean <= high for low, mean, high in there)
    assert min((low for low, _, _ in there), default=0) == min(finite, default=0)
    assert max((high for _, _, high in there), default=0) == max(finite, default=0)


@given(st.lists(st.tuples(st.integers(-30, 30), st.integers(1, 200)), min_size=1, max_size=30))
def test_steps_ascend_and_every_value_is_kept_however_often_a_loop_begins_again(
    loops: list[tuple[int, int]],
) -> None:
    steps = [step for first, count in loops for step in range(first, first + count)]
    curve = curve_of((step, float(number)) for number, step in enumerate(steps))
    assert all(a < b for a, b in itertools.pairwise(curve.steps))
    assert (min(curve.low), max(curve.high)) == (0.0, len(steps) - 1.0)
    assert curve.falls == sum(a > b for a, b in itertools.pairwise(steps))
    assert len(curve.steps) <= MAX_BUCKETS


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf, 1e305])
def test_a_value_that_is_not_finite_is_a_point_without_a_value(strange: float) -> None:
    curve = curve_of([(0, 1.0), (1, strange), (2, 3.0)])
    assert (curve.values[0], curve.values[2]) == (1.0, 3.0)
    assert all(math.isnan(each[1]) for each in (curve.values, curve.low, curve.high))
    assert curve.lost == (0, 1, 0)


def test_of_values_that_are_not_finite_the_others_are_kept_and_none_where_there_are_none() -> None:
    curve = curve_of((step, math.nan if step == 1 else 2.0) for step in range(MAX_BUCKETS + 1))
    assert (curve.values[0], curve.low[0], curve.high[0], curve.lost[0]) == (2.0, 2.0, 2.0, 1)
    curve = curve_of((step, 1.0 if step < 1000 else math.nan) for step in range(10_000))
    assert math.isnan(curve.values[-1])
    assert math.isnan(curve.last)
    assert sum(curve.lost) == 9_000


# ---- several ranks and names


def test_all_ranks_begin_a_loop_at_the_same_place_also_where_one_had_fewer_steps() -> None:
    metrics = Curves()
    for _ in range(3):
        for rank, count in ((1, 4), (0, 5), (2, 3)):
            for step in range(count):
                metrics.add(rank, 0.0, step, {"loss": 1.0})
    curves = metrics.curves("loss")
    assert curves[0].begins == curves[1].begins == curves[2].begins == (5.0, 10.0)
    assert curves[2].steps == (0.0, 1.0, 2.0, 5.0, 6.0, 7.0, 10.0, 11.0, 12.0)


def test_a_rank_that_was_not_through_when_another_began_again_loses_nothing() -> None:
    metrics = Curves()
    for rank, step in [(0, 0), (1, 0), (0, 1), (0, 0), (1, 1), (1, 2), (1, 3), (1, 0)]:
        metrics.add(rank, 0.0, step, {"loss": 1.0})
    curves = metrics.curves("loss")
    assert curves[0].begins == (2.0,)
    assert (curves[1].steps, curves[1].begins) == ((0.0, 1.0, 2.0, 3.0, 4.0), (4.0,))


def test_without_a_step_each_name_of_each_rank_counts_by_itself() -> None:
    metrics = Curves()
    for batch in range(4):
        metrics.add(0, 0.0, None, {"loss": float(batch)})
        if batch % 2:
            metrics.add(0, 0.0, None, {"accuracy": 1.0})
            metrics.add(1, 0.0, None, {"loss": 1.0})
    assert metrics.curves("loss")[0].steps == (0.0, 1.0, 2.0, 3.0)
    assert metrics.curves("loss")[1].steps == (0.0, 1.0)
    assert metrics.curves("accuracy")[0].steps == (0.0, 1.0)


def test_names_beyond_the_bound_are_left_out_and_counted_once() -> None:
    metrics = Curves()
    for _ in range(2):
        metrics.add(0, 0.0, 0, {f"metric {number}": 1.0 for number in range(MAX_NAMES + 3)})
    assert metrics.names() == [f"metric {number}" for number in range(MAX_NAMES)]
    assert (metrics.dropped_names, metrics.drops_more) == (3, False)
    assert metrics.curves("metric 65") == {}
    metrics.add(0, 0.0, 0, {f"metric {number}": 1.0 for number in range(MAX_DROPPED + 65)})
    assert len(metrics.names()) == MAX_NAMES
    assert (metrics.dropped_names, metrics.drops_more) == (MAX_DROPPED, True)


def test_names_that_are_wanted_are_kept_whatever_came_before_them() -> None:
    metrics = Curves(wanted=lambda name: name[-1:] == "7")
    for step in range(2):
        metrics.add(0, 0.0, step, {f"m{number}": step + number for number in range(3000)})
    first = [f"m{number}" for number in range(MAX_NAMES)]
    wanted = [f"m{number}" for number in range(7, 3000, 10)][:MAX_NAMES]
    assert metrics.names() == [*first, *(name for name in wanted if name not in first)]
    assert metrics.curves(wanted[-1])[0].values == (637.0, 638.0)
    assert len(metrics.names()) + metrics.dropped_names == 3000


def test_long_names_are_cut_where_one_sees_it_and_not_mixed_up() -> None:
    metrics = Curves()
    one, other = "x" * 10_000 + "1", "x" * 10_000 + "\ud800"
    metrics.add(0, 0.0, 0, {one: 1.0, other: 2.0})
    assert [len(name) for name in metrics.names()] == [MAX_NAME, MAX_NAME]
    assert all(name.startswith("xxx") and name[-9] == "…" for name in metrics.names())
    assert [metrics.last(name) for name in metrics.names()] == [{0: 1.0}, {0: 2.0}]
    assert metrics.last(one) == {0: 1.0}
    assert metrics.version_of(one) == metrics.version_of(metrics.names()[0]) > 0


def test_each_report_is_news_of_its_metrics_only_and_so_is_what_comes_after_clearing() -> None:
    metrics = Curves()
    metrics.add(0, 0.0, 0, {"loss": 1.0, "accuracy": 1.0})
    before, loss, accuracy = (metrics.version, *map(metrics.version_of, ("loss", "accuracy")))
    metrics.add(0, 0.0, 1, {"loss": 1.0})
    newer = metrics.version_of("loss")
    assert metrics.version != before
    assert newer != loss
    assert metrics.version_of("accuracy") == accuracy
    assert metrics.version_of("nothing") == 0
    before = metrics.version
    metrics.clear()
    assert metrics.version != before
    assert (metrics.names(), metrics.version_of("loss"), metrics.pace(0)) == ([], 0, None)
    metrics.add(0, 2.0, 0, {"loss": 1.0})
    assert metrics.version_of("loss") not in (0, loss, newer)


# ---- pace


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-4)


PACES: dict[str, tuple[list[tuple[float, float | None]], Pace | None]] = {
    "nothing": ([], None),
    "one step": ([(100.0, 5)], Pace(5, 0.0, 100.0)),
    "steps": ([(100 + step / 50, step) for step in range(500)], Pace(499, near(50), near(109.98))),
    "what counts by itself": ([(at / 50, None) for at in range(101)], Pace(100, near(50), 2.0)),
    "faster of late": (
        [(at, at) for at in range(100)] + [(100 + at / 10, 100 + at) for at in range(200)],
        Pace(299, near(10), near(119.9)),
    ),
    "longer than the recent past": (
        [(60.0 * step, step) for step in range(5)],
        Pace(4, near(1 / 60), 240.0),
    ),
    "many reports of one step": (
        [(0.0, 0), (1.0, 10), *((1.0 + tenth / 10, 10) for tenth in range(50))],
        Pace(10, 10.0, 1.0),
    ),
    "a loop that began again": ([(0.0, 0), (1.0, 1000), (2.0, 0)], Pace(0, 0.0, 2.0)),
    "and goes on": ([(0.0, 0), (1.0, 1000), (2.0, 0), (3.0, 5)], Pace(5, 5.0, 3.0)),
    "a clock that was put back": ([(100.0, 0), (101.0, 1), (50.0, 2)], Pace(2, 0.0, 50.0)),
}


@pytest.mark.parametrize(("reports", "pace"), PACES.values(), ids=PACES)
def test_the_pace_of_a_rank(reports: list[tuple[float, float | None]], pace: Pace | None) -> None:
    metrics = Curves()
    for at, step in reports:
        metrics.add(0, at, step, {"loss": 1.0})
    assert metrics.pace(0) == pace


def test_the_fastest_of_the_loops_that_still_go_on_is_the_pace() -> None:
    metrics = Curves()
    for batch in range(300):
        metrics.add(0, batch / 100, batch, {"loss": 1.0})
        if batch % 100 == 99:
            metrics.add(0, batch / 100, batch // 100, {"accuracy": 1.0})
    assert metrics.pace(0) == Pace(299, near(100.0), 2.99)
    for step in range(30):
        metrics.add(0, 3 + step, step, {"finetuning": 1.0})
    assert metrics.pace(0) == Pace(29, near(1.0), 32.0)
    metrics.add(3, 1.0, 8, {})
    assert metrics.pace(3) == Pace(8, 0.0, 1.0)


# ---- bounds and threads


def test_a_hundred_thousand_points_need_less_than_a_megabyte() -> None:
    metrics = Curves()
    values = {f"metric {number}": 0.5 for number in range(10)}
    with keeps_less_than(1_000_000):
        for step in range(10_000):
            metrics.add(0, step / 1000, step, values)
    assert len(metrics.curves("metric 0")[0].steps) <= MAX_BUCKETS


def test_steps_that_fall_back_ten_thousand_times_are_bounded() -> None:
    metrics = Curves()
    with keeps_less_than(1_000_000):
        for step in range(20_000, 0, -1):
            metrics.add(step % 2, 0.0, step, {"loss": 1.0})
    curve = metrics.curves("loss")[0]
    assert (len(curve.begins), curve.falls) == (MAX_MARKS, 9_999)
    assert len(curve.steps) <= MAX_BUCKETS


def test_others_may_read_while_one_thread_adds() -> None:
    metrics = Curves()

    def add() -> None:
        for step in range(10_000):
            metrics.add(step % 3, step / 100, step, {f"metric {step % 7}": 1.0})

    adder = threading.Thread(target=add)
    adder.start()
    while adder.is_alive():
        metrics.pace(0)
        for curve in metrics.curves("metric 0").values():
            assert len(curve.steps) == len(curve.values) == len(curve.lost)
    adder.join()
    assert len(metrics.names()) == 7
    assert metrics.version == 10_000
