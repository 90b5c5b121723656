"""The metrics: any number of reports becomes curves that fit, and nothing that matters is lost."""

from __future__ import annotations

import itertools
import math
import threading
import tracemalloc
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.record.curves import MAX_DROPPED, MAX_NAME, MAX_NAMES, Curves, Pace
from nbddp.record.series import MAX_BUCKETS, MAX_MARKS, Curve


def reported(points: Iterable[tuple[float, float]], *, rank: int = 0) -> Curves:
    metrics = Curves()
    for step, value in points:
        metrics.add(rank, 0.0, step, {"loss": value})
    return metrics


def curve_of(points: Iterable[tuple[float, float]]) -> Curve:
    return reported(points).curves("loss")[0]


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


def test_a_metric_that_nobody_reported_has_no_curves() -> None:
    metrics = Curves()
    assert (metrics.curves("loss"), metrics.last("loss"), metrics.names()) == ({}, {}, [])


def test_as_many_points_as_there_are_buckets_are_kept_as_they_are() -> None:
    points = [(float(step), math.sin(step)) for step in range(MAX_BUCKETS)]
    curve = curve_of(points)
    assert list(zip(curve.steps, curve.values, strict=True)) == points
    assert curve.low == curve.high == curve.values


def test_more_points_are_put_together_with_their_neighbours() -> None:
    curve = curve_of((step, float(step % 2)) for step in range(MAX_BUCKETS + 1))
    assert curve.steps[:2] == (0.5, 2.5)
    assert (curve.values[0], curve.low[0], curve.high[0]) == (0.5, 0.0, 1.0)
    assert curve.steps[-1] == MAX_BUCKETS


def test_a_spike_among_a_hundred_thousand_points_is_still_seen() -> None:
    curve = curve_of((step, 9.0 if step == 54_321 else 1.0) for step in range(100_000))
    assert max(curve.high) == 9.0
    at = curve.high.index(9.0)
    assert curve.steps[at] == pytest.approx(54_321, abs=200)
    assert curve.low[at] == 1.0 < curve.values[at] < 9.0


def test_several_values_of_one_step_are_one_point() -> None:
    curve = curve_of([(0, 1.0), (0, 3.0), (1, 5.0), (1, 5.0), (1, 8.0)])
    assert (curve.steps, curve.values) == ((0.0, 1.0), (2.0, 6.0))
    assert (curve.low, curve.high, curve.last) == ((1.0, 5.0), (3.0, 8.0), 8.0)


def test_a_curve_in_full_never_has_more_buckets_than_fit() -> None:
    metrics = Curves()
    for step in range(5 * MAX_BUCKETS):
        metrics.add(0, 0.0, step, {"loss": 1.0})
        if step % 97 == 0 or step in (MAX_BUCKETS - 1, MAX_BUCKETS):
            assert len(metrics.curves("loss")[0].steps) <= MAX_BUCKETS


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
    assert all(a < b for a, b in zip(curve.steps, curve.steps[1:], strict=False))
    assert (min(curve.low), max(curve.high)) == (0.0, len(steps) - 1.0)
    assert curve.falls == sum(a > b for a, b in itertools.pairwise(steps))
    assert len(curve.steps) <= MAX_BUCKETS


# ---- values that are not finite


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf, 1e305])
def test_a_value_that_is_not_finite_is_a_point_without_a_value(strange: float) -> None:
    curve = curve_of([(0, 1.0), (1, strange), (2, 3.0)])
    assert (curve.values[0], curve.values[2]) == (1.0, 3.0)
    assert math.isnan(curve.values[1])
    assert math.isnan(curve.low[1])
    assert math.isnan(curve.high[1])
    assert curve.lost == (0, 1, 0)


def test_a_bucket_with_other_values_keeps_their_mean_and_counts_the_lost() -> None:
    points = ((step, math.nan if step == 1 else 2.0) for step in range(MAX_BUCKETS + 1))
    curve = curve_of(points)
    assert (curve.values[0], curve.low[0], curve.high[0], curve.lost[0]) == (2.0, 2.0, 2.0, 1)


def test_a_loss_that_stays_nan_is_nan_to_the_end_however_long_it_runs() -> None:
    curve = curve_of((step, 1.0 if step < 1000 else math.nan) for step in range(50_000))
    assert math.isnan(curve.values[-1])
    assert math.isnan(curve.last)
    assert sum(curve.lost) == 49_000


def test_the_newest_value_is_told_as_it_came() -> None:
    assert reported([(0, 1.0), (1, math.inf)]).last("loss") == {0: math.inf}


# ---- steps that fall back


def test_a_loop_that_begins_again_is_counted_on_and_nothing_is_wiped() -> None:
    curve = curve_of([(0, 5.0), (1, 4.0), (2, 3.0), (0, 9.0), (1, 8.0), (0, 7.0)])
    assert curve.steps == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert curve.values == (5.0, 4.0, 3.0, 9.0, 8.0, 7.0)
    assert (curve.begins, curve.falls, curve.restarts) == ((3.0, 5.0), 2, ())


def test_steps_that_are_far_apart_stay_so_where_a_loop_begins_again() -> None:
    curve = curve_of([(step, 1.0) for _ in range(3) for step in (0, 10, 20)])
    assert curve.steps == tuple(10.0 * count for count in range(9))
    assert curve.begins == (30.0, 60.0)


def test_a_step_that_counts_down_is_a_line_and_not_a_dot() -> None:
    curve = curve_of((step, float(step)) for step in range(5, 0, -1))
    assert curve.steps == (5.0, 6.0, 7.0, 8.0, 9.0)
    assert curve.values == (5.0, 4.0, 3.0, 2.0, 1.0)
    assert curve.falls == 4


def test_steps_that_fall_back_a_hundred_thousand_times_are_bounded() -> None:
    metrics = Curves()
    tracemalloc.start()
    try:
        for step in range(100_000, 0, -1):
            metrics.add(step % 4, 0.0, step, {"loss": 1.0})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
    curve = metrics.curves("loss")[0]
    assert (len(curve.begins), curve.falls) == (MAX_MARKS, 24_999)
    assert len(curve.steps) <= MAX_BUCKETS


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


def test_metrics_whose_step_fell_back_are_told_with_how_often_it_did() -> None:
    metrics = Curves()
    for step in (0, 1, 0, 1, 0):
        metrics.add(0, 0.0, step, {"loss": 1.0})
        metrics.add(0, 0.0, 7, {"accuracy": 1.0})
    assert metrics.snapshot(most=12).falls == {"loss": 2}


# ---- another attempt


def taken_up(before: Iterable[tuple[float, float]], after: Iterable[tuple[float, float]]) -> Curve:
    metrics = reported(before)
    metrics.take_up()
    for step, value in after:
        metrics.add(0, 0.0, step, {"loss": value})
    return metrics.curves("loss")[0]


def test_an_attempt_that_goes_on_from_a_checkpoint_replaces_what_it_does_again() -> None:
    points = [(0, 5.0), (1, 4.0), (2, math.nan), (3, 2.0)]
    curve = taken_up(points, [(2, 9.0), (3, 8.0)])
    assert (curve.steps, curve.values) == ((0.0, 1.0, 2.0, 3.0), (5.0, 4.0, 9.0, 8.0))
    assert curve.lost == (0, 0, 0, 0)
    assert (curve.restarts, curve.begins, curve.falls) == ((2.0,), (), 0)


def test_an_attempt_that_begins_anew_is_drawn_in_full_detail() -> None:
    long, short = range(10 * MAX_BUCKETS), range(10)
    curve = taken_up(((step, 1.0) for step in long), ((step, 2.0) for step in short))
    assert curve.steps == tuple(map(float, short))
    assert curve.restarts == (0.0,)


def test_each_restart_has_a_mark_unless_a_later_one_went_further_back() -> None:
    metrics = Curves()
    for steps in ((0, 1, 2, 3, 4, 5), (4, 5, 6, 7), (7, 8), (6, 7)):
        for step in steps:
            metrics.add(0, 0.0, step, {"loss": 1.0})
        metrics.take_up()
    curve = metrics.curves("loss")[0]
    assert curve.steps == tuple(map(float, range(8)))
    assert curve.restarts == (4.0, 6.0)


def test_an_attempt_at_loops_that_begin_again_is_counted_on_as_one_more() -> None:
    curve = taken_up([(0, 5.0), (1, 4.0), (0, 3.0), (1, 2.0)], [(0, 9.0), (1, 8.0), (0, 7.0)])
    assert curve.steps == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    assert curve.values == (5.0, 4.0, 3.0, 2.0, 9.0, 8.0, 7.0)
    assert (curve.begins, curve.restarts) == ((2.0, 6.0), (4.0,))


def test_an_attempt_that_does_no_step_again_has_its_mark_all_the_same() -> None:
    curve = taken_up([(0, 5.0), (1, 4.0)], [(2, 3.0), (3, 2.0)])
    assert (curve.steps, curve.restarts) == ((0.0, 1.0, 2.0, 3.0), (2.0,))


# ---- values without a step


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


def test_a_count_goes_on_from_a_step_that_was_given_and_through_a_restart() -> None:
    metrics = reported([(7, 1.0)])
    metrics.add(0, 0.0, None, {"loss": 2.0})
    metrics.take_up()
    metrics.add(0, 0.0, None, {"loss": 3.0})
    curve = metrics.curves("loss")[0]
    assert (curve.steps, curve.restarts, curve.falls) == ((7.0, 8.0, 9.0), (9.0,), 0)


def test_what_counts_by_itself_has_a_pace() -> None:
    metrics = Curves()
    for count in range(101):
        metrics.add(0, count / 50, None, {"loss": 1.0})
    assert metrics.pace(0) == Pace(100, pytest.approx(50.0), 2.0)


def test_a_step_may_be_any_whole_number() -> None:
    curve = curve_of([(-(10**400), 1.0), (0, 2.0), (10**400, 3.0), (10**500, 5.0)])
    assert curve.steps == (-(2.0**53), 0.0, 2.0**53)
    assert curve.values == (1.0, 2.0, 4.0)


# ---- names


def test_names_beyond_the_bound_are_left_out_and_counted_once() -> None:
    metrics = Curves()
    for _ in range(2):
        metrics.add(0, 0.0, 0, {f"metric {number}": 1.0 for number in range(MAX_NAMES + 3)})
    assert metrics.names() == [f"metric {number}" for number in range(MAX_NAMES)]
    assert metrics.dropped_names == 3
    assert metrics.curves("metric 65") == {}


def test_a_flood_of_names_is_counted_to_a_bound() -> None:
    metrics = Curves()
    for number in range(3000):
        metrics.add(0, 0.0, number, {f"metric {number}": 1.0})
    assert len(metrics.names()) == MAX_NAMES
    assert (metrics.dropped_names, metrics.drops_more) == (3000 - MAX_NAMES, False)
    for number in range(3000, MAX_DROPPED + MAX_NAMES + 1):
        metrics.add(0, 0.0, number, {f"metric {number}": 1.0})
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


# ---- versions


def test_each_report_is_news_of_its_metrics_only() -> None:
    metrics = Curves()
    metrics.add(0, 0.0, 0, {"loss": 1.0, "accuracy": 1.0})
    before, loss, accuracy = (metrics.version, *map(metrics.version_of, ("loss", "accuracy")))
    metrics.add(0, 0.0, 1, {"loss": 1.0})
    assert metrics.version != before
    assert metrics.version_of("loss") != loss
    assert metrics.version_of("accuracy") == accuracy
    assert metrics.version_of("nothing") == 0


def test_what_comes_after_clearing_is_news_again() -> None:
    metrics = Curves()
    metrics.add(0, 1.0, 7, {"loss": 1.0})
    before, loss = metrics.version, metrics.version_of("loss")
    metrics.clear()
    assert metrics.version != before
    assert (metrics.names(), metrics.version_of("loss"), metrics.pace(0)) == ([], 0, None)
    metrics.add(0, 2.0, 0, {"loss": 1.0})
    assert metrics.version_of("loss") not in (0, loss)


# ---- pace


def paced(*reports: tuple[float, float], name: str = "loss") -> Curves:
    metrics = Curves()
    for at, step in reports:
        metrics.add(0, at, step, {name: 1.0})
    return metrics


def test_a_rank_that_reported_nothing_has_no_pace() -> None:
    assert Curves().pace(0) is None


def test_one_step_says_how_far_but_not_how_fast() -> None:
    assert paced((100.0, 5)).pace(0) == Pace(step=5, per_second=0.0, at=100.0)


def test_the_pace_is_steps_per_second() -> None:
    assert paced(*((100 + step / 50, step) for step in range(500))).pace(0) == Pace(
        step=499, per_second=pytest.approx(50.0), at=pytest.approx(109.98)
    )


def test_the_pace_is_that_of_the_recent_past() -> None:
    slow = [(float(second), second) for second in range(100)]
    fast = [(100 + tenth / 10, 100 + tenth) for tenth in range(200)]
    pace = paced(*slow, *fast).pace(0)
    assert pace is not None
    assert pace.per_second == pytest.approx(10.0)


def test_steps_that_take_longer_than_the_recent_past_have_a_pace_too() -> None:
    pace = paced(*((60.0 * step, step) for step in range(5))).pace(0)
    assert pace is not None
    assert pace.per_second == pytest.approx(1 / 60)


def test_many_reports_of_one_step_are_no_progress() -> None:
    reports = [(0.0, 0), (1.0, 10), *((1.0 + tenth / 10, 10) for tenth in range(50))]
    pace = paced(*reports).pace(0)
    assert pace == Pace(step=10, per_second=10.0, at=1.0)


def test_a_loop_that_begins_again_has_a_pace_of_its_own() -> None:
    assert paced((0.0, 0), (1.0, 1000), (2.0, 0)).pace(0) == Pace(0, 0.0, 2.0)
    pace = paced((0.0, 0), (1.0, 1000), (2.0, 0), (3.0, 5)).pace(0)
    assert pace == Pace(step=5, per_second=5.0, at=3.0)


def test_a_clock_that_was_put_back_does_not_make_a_pace_negative() -> None:
    assert paced((100.0, 0), (101.0, 1), (50.0, 2)).pace(0) == Pace(2, 0.0, 50.0)


def test_epochs_reported_among_batches_do_not_disturb_their_pace() -> None:
    metrics = Curves()
    for batch in range(300):
        metrics.add(0, batch / 100, batch, {"loss": 1.0})
        if batch % 100 == 99:
            metrics.add(0, batch / 100, batch // 100, {"accuracy": 1.0})
    assert metrics.pace(0) == Pace(299, pytest.approx(100.0), 2.99)


def test_a_loop_that_ended_long_ago_is_not_the_pace() -> None:
    metrics = paced(*((step / 100, step) for step in range(300)), name="pretraining")
    for step in range(30):
        metrics.add(0, 3 + step, step, {"finetuning": 1.0})
    assert metrics.pace(0) == Pace(29, pytest.approx(1.0), 32.0)


def test_a_report_without_values_still_tells_the_step() -> None:
    metrics = Curves()
    metrics.add(3, 1.0, 8, {})
    assert metrics.pace(3) == Pace(8, 0.0, 1.0)
    assert metrics.names() == []


# ---- bounds and threads


def test_a_million_points_need_less_than_a_megabyte() -> None:
    metrics = Curves()
    values = {f"metric {number}": 0.5 for number in range(10)}
    tracemalloc.start()
    try:
        for step in range(100_000):
            metrics.add(0, step / 1000, step, values)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
    assert len(metrics.curves("metric 0")[0].steps) <= MAX_BUCKETS


def test_others_may_read_while_one_thread_adds() -> None:
    metrics = Curves()

    def add() -> None:
        for step in range(20_000):
            metrics.add(step % 3, step / 100, step, {f"metric {step % 7}": 1.0})

    adder = threading.Thread(target=add)
    adder.start()
    while adder.is_alive():
        metrics.pace(0)
        for curve in metrics.curves("metric 0").values():
            assert len(curve.steps) == len(curve.values) == len(curve.lost)
    adder.join()
    assert len(metrics.names()) == 7
    assert metrics.version == 20_000
