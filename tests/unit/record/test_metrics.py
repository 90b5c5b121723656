"""The metrics: any number of reports becomes curves that fit, and nothing that matters is lost."""

import itertools
import math
import threading
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_use import keeps_less_than
from syrupy.assertion import SnapshotAssertion

from nbddp.record.metrics import (
    MAX_BUCKETS,
    MAX_COARSE_PAIRS,
    MAX_DROPPED,
    MAX_FINITE,
    MAX_NAMES,
    Curve,
    MetricStore,
    RunTotals,
)
from nbddp.record.step_rate import StepRate

Points = Iterable[tuple[float | None, float]]
Row = tuple[int, float, float | None, dict[str, float]]  # rank, time, step and values


def store_of(*rows: Row) -> MetricStore:
    metrics = MetricStore()
    for row in rows:
        metrics.add(*row)
    return metrics


def reported(*attempts: Points) -> MetricStore:
    """The losses that rank 0 reported, in one attempt after the other."""
    metrics = MetricStore()
    for number, points in enumerate(attempts):
        if number:
            metrics.resume()
        for step, value in points:
            metrics.add(0, 0.0, step, {"loss": value})
    return metrics


def curve_of(*attempts: Points) -> Curve:
    return reported(*attempts).curves("loss")[0]


# ---- curves


def test_metrics_are_stored_by_name_and_rank() -> None:
    of_rank_0: list[Row] = [(0, 0.5, 0, {"loss": 3.0}), (0, 0.75, 1, {"loss": 1.0})]
    metrics = store_of((1, 0.0, 0, {"loss": 2.0, "accuracy": 0.1}), *of_rank_0)
    assert metrics.names() == ["loss", "accuracy"]
    assert list(metrics.curves("loss")) == [0, 1]
    values = dict.fromkeys(("mean", "low", "high"), (3.0, 1.0))
    curve = Curve(times=(0.5, 0.75), steps=(0.0, 1.0), **values, nonfinite=(0, 0), last=1.0)
    assert metrics.curves("loss")[0] == curve
    assert (metrics.began, metrics.ended) == (0.0, 0.75)
    assert metrics.last("loss") == {0: 1.0, 1: 2.0}
    assert (metrics.curves("nothing"), metrics.last("nothing")) == ({}, {})
    assert reported([(0, 1.0), (1, math.inf)]).last("loss") == {0: math.inf}


CURVES: dict[str, list[Points]] = {
    "several values of one step": [[(0, 1.0), (0, 3.0), (1, 5.0), (1, 5.0), (1, 8.0)]],
    "any whole number is a step": [[(-(10**400), 1.0), (0, 2.0), (10**400, 3.0), (10**500, 5.0)]],
    "a loop that begins again": [[(0, 5.0), (1, 4.0), (2, 3.0), (0, 9.0), (1, 8.0), (0, 7.0)]],
    "steps that are far apart": [[(step, 1.0) for _ in range(3) for step in (0, 10, 20)]],
    "a step that counts down": [[(step, step) for step in range(5, 0, -1)]],
    "an attempt that goes on from a checkpoint": [
        *([(0, 5.0), (1, 4.0), (2, math.nan), (3, 2.0)], [(2, 9.0), (3, 8.0)])
    ],
    "an attempt that begins from the first step": [
        *([(step, 1.0) for step in range(10 * MAX_BUCKETS)], [(0, 2.0), (1, 2.0), (2, 2.0)])
    ],
    "restarts of which a later one went further back": [
        [(step, 1.0) for step in steps] for steps in (range(6), range(4, 8), (7, 8), (6, 7))
    ],
    "an attempt at loops that begin again": [
        *([(0, 5.0), (1, 4.0), (0, 3.0), (1, 2.0)], [(0, 9.0), (1, 8.0), (0, 7.0)])
    ],
    "an attempt that does no step again": [[(0, 5.0), (1, 4.0)], [(2, 3.0), (3, 2.0)]],
    "a count that goes on from a step": [[(7, 1.0), (None, 2.0)], [(None, 3.0)]],
}


@pytest.mark.parametrize("attempts", CURVES.values(), ids=CURVES)
def test_metric_points_become_a_curve(attempts: list[Points], snapshot: SnapshotAssertion) -> None:
    curve = curve_of(*attempts)
    values = zip(curve.steps, curve.mean, curve.low, curve.high, strict=True)
    lines = [f"{step}: {mean}, {low} to {high}" for step, mean, low, high in values]
    lines += [f"last {curve.last}, not finite {sum(curve.nonfinite)}"]
    assert [*lines, f"resumed at {curve.resume_points}"] == snapshot


def test_neighbouring_points_are_merged_only_beyond_the_bucket_limit() -> None:
    points = [(float(step), math.sin(step)) for step in range(MAX_BUCKETS)]
    curve = curve_of(points)
    assert list(zip(curve.steps, curve.mean, strict=True)) == points
    assert curve.low == curve.high == curve.mean
    curve = curve_of((step, float(step % 2)) for step in range(MAX_BUCKETS + 1))
    assert curve.steps[:2] == (0.5, 2.5)
    assert (curve.mean[0], curve.low[0], curve.high[0]) == (0.5, 0.0, 1.0)
    assert curve.steps[-1] == MAX_BUCKETS


@given(
    st.lists(st.floats(width=32) | st.floats(), min_size=1, max_size=50),
    st.integers(min_value=1, max_value=120),
)
def test_thinned_curves_keep_extremes_and_nonfinite_counts(values: list[float], times: int) -> None:
    values = values * times
    curve = curve_of(enumerate(values))
    finite = [value for value in values if abs(value) < 1e300]
    seen = list(zip(curve.low, curve.mean, curve.high, strict=True))
    there = [(low, mean, high) for low, mean, high in seen if not math.isnan(mean)]
    assert len(curve.steps) <= MAX_BUCKETS
    assert sum(curve.nonfinite) == len(values) - len(finite)
    assert all(low <= mean <= high for low, mean, high in there)
    assert min((low for low, _, _ in there), default=0) == min(finite, default=0)
    assert max((high for _, _, high in there), default=0) == max(finite, default=0)


@given(st.lists(st.tuples(st.integers(-30, 30), st.integers(1, 200)), min_size=1, max_size=30))
def test_steps_of_restarted_loops_ascend_and_keep_every_value(loops: list[tuple[int, int]]) -> None:
    steps = [step for first, count in loops for step in range(first, first + count)]
    curve = curve_of((step, float(number)) for number, step in enumerate(steps))
    assert all(a < b for a, b in itertools.pairwise(curve.steps))
    assert (min(curve.low), max(curve.high)) == (0.0, len(steps) - 1.0)
    assert len(curve.steps) <= MAX_BUCKETS


def test_a_point_is_the_mean_of_its_finite_values_or_nan_without_any() -> None:
    for strange in (math.nan, math.inf, -math.inf, 1e305):
        curve = curve_of([(0, 1.0), (1, strange), (2, 3.0)])
        assert (curve.mean[0], curve.mean[2]) == (1.0, 3.0)
        assert all(math.isnan(each[1]) for each in (curve.mean, curve.low, curve.high))
        assert curve.nonfinite == (0, 1, 0)
    curve = curve_of((step, math.nan if step == 1 else 2.0) for step in range(MAX_BUCKETS + 1))
    assert (curve.mean[0], curve.low[0], curve.high[0], curve.nonfinite[0]) == (2.0, 2.0, 2.0, 1)
    curve = curve_of((step, 1.0 if step < 1000 else math.nan) for step in range(10_000))
    assert math.isnan(curve.mean[-1])
    assert math.isnan(curve.last)


# ---- several ranks and names


def test_metric_names_beyond_the_limit_are_dropped_and_counted_once() -> None:
    metrics = MetricStore()
    for _ in range(2):
        metrics.add(0, 0.0, 0, {f"metric {number}": 1.0 for number in range(MAX_NAMES + 3)})
    assert metrics.names() == [f"metric {number}" for number in range(MAX_NAMES)]
    assert metrics.dropped_names == 3
    assert metrics.curves("metric 65") == {}
    metrics.add(0, 0.0, 0, {f"metric {number}": 1.0 for number in range(MAX_DROPPED + 65)})
    assert len(metrics.names()) == MAX_NAMES
    assert metrics.dropped_names == MAX_DROPPED


def test_a_report_changes_only_the_versions_of_its_metrics_even_after_clear() -> None:
    metrics = store_of((0, 0.0, 0, {"loss": 1.0, "accuracy": 1.0}))
    first = metrics.snapshot(most=9).versions
    metrics.add(0, 0.0, 1, {"loss": 1.0})
    newer = metrics.snapshot(first, most=9)
    assert newer.versions["loss"] != first["loss"]
    assert newer.versions["accuracy"] == first["accuracy"]
    assert [*newer.curves] == ["loss"]
    metrics.clear()
    assert (metrics.names(), metrics.step_rate(0)) == ([], None)
    metrics.add(0, 2.0, 0, {"loss": 1.0})
    last = metrics.snapshot(most=9).versions["loss"]
    assert last not in (0, first["loss"], newer.versions["loss"])


# ---- step rate


RATES: dict[str, list[tuple[float, float | None]]] = {
    "nothing": [],
    "one step": [(100.0, 5)],
    "steps": [(100 + step / 50, step) for step in range(500)],
    "what counts by itself": [(at / 50, None) for at in range(101)],
    "faster of late": [
        *((at, at) for at in range(100)),
        *((100 + at / 10, 100 + at) for at in range(200)),
    ],
    "longer than the recent past": [(60.0 * step, step) for step in range(5)],
    "many reports of one step": [(0.0, 0), *((1.0 + tenth / 10, 10) for tenth in range(51))],
    "a loop that began again": [(0.0, 0), (1.0, 1000), (2.0, 0)],
    "and goes on": [(0.0, 0), (1.0, 1000), (2.0, 0), (3.0, 5)],
    "a clock that was put back": [(100.0, 0), (101.0, 1), (50.0, 2)],
}


def test_the_step_rate_of_a_rank_is_computed_from_its_reports(snapshot: SnapshotAssertion) -> None:
    rates = {}
    for name, reports in RATES.items():
        rate = store_of(*((0, at, step, {"loss": 1.0}) for at, step in reports)).step_rate(0)
        rates[name] = (
            rate and f"step {rate.step:g} at {rate.at:.2f}, {rate.per_second:.4f} a second"
        )
    assert rates == snapshot


def test_the_step_rate_is_that_of_the_fastest_running_loop() -> None:
    metrics = MetricStore()
    for batch in range(300):
        metrics.add(0, batch / 100, batch, {"loss": 1.0})
        if batch % 100 == 99:
            metrics.add(0, batch / 100, batch // 100, {"accuracy": 1.0})
    assert metrics.step_rate(0) == StepRate(299, pytest.approx(100.0, rel=1e-4), 2.99)
    for step in range(30):
        metrics.add(0, 3 + step, step, {"finetuning": 1.0})
    assert metrics.step_rate(0) == StepRate(29, pytest.approx(1.0, rel=1e-4), 32.0)


# ---- bounds and threads


def test_a_hundred_thousand_points_take_less_than_a_megabyte() -> None:
    metrics = MetricStore()
    values = {f"metric {number}": 0.5 for number in range(10)}
    with keeps_less_than(1_000_000):
        for step in range(10_000):
            metrics.add(0, step / 1000, step, values)
    assert len(metrics.curves("metric 0")[0].steps) <= MAX_BUCKETS


def test_metrics_can_be_read_while_another_thread_adds() -> None:
    metrics = MetricStore()

    def add() -> None:
        for step in range(10_000):
            metrics.add(step % 3, step / 100, step, {f"metric {step % 7}": 1.0})

    adder = threading.Thread(target=add)
    adder.start()
    while adder.is_alive():
        metrics.step_rate(0)
        for curve in metrics.curves("metric 0").values():
            assert len(curve.steps) == len(curve.mean) == len(curve.nonfinite)
    adder.join()
    every = [each for name in metrics.names() for each in metrics.series(name).values()]
    assert sum(series.step_count for series in every) == 10_000


# ---- all of a run at once, as from a file

STEPS = st.none() | st.integers(-5, 300) | st.just(10**400)
VALUES = st.floats() | st.integers(-5, 5) | st.sampled_from([10**400, MAX_FINITE])


@given(
    st.lists(st.tuples(STEPS, VALUES), min_size=1, max_size=40)
    | st.integers(1, 2500).map(lambda count: [(step, step % 7) for step in range(count)])
)
def test_values_in_bulk_give_the_same_curve(points: list[tuple[int | None, float]]) -> None:
    at_once, one_by_one = MetricStore(), MetricStore()
    times = [number / 4 for number in range(len(points))]
    at_once.extend(0, "loss", times, [step for step, _ in points], [value for _, value in points])
    for at, (step, value) in zip(times, points, strict=True):
        one_by_one.add(0, at, step, {"loss": value})
    for metrics in (at_once, one_by_one):
        metrics.resume()
        metrics.add(0, 1000.0, 150, {"loss": 1.0})
    found, expected = (metrics.curves("loss")[0] for metrics in (at_once, one_by_one))
    assert repr(found) == repr(expected)
    assert at_once.step_rate(0) == one_by_one.step_rate(0)
    assert (at_once.began, at_once.ended) == (one_by_one.began, one_by_one.ended)


# ---- coarse curves


@given(st.lists(st.floats(), max_size=5 * MAX_COARSE_PAIRS))
def test_a_coarse_curve_has_the_lowest_and_the_highest_value(values: list[float]) -> None:
    pairs = curve_of(enumerate(values)).coarse() if values else []
    assert len(pairs) <= MAX_COARSE_PAIRS
    finite = [value for value in values if abs(value) < MAX_FINITE]
    shown = [end for pair in pairs for end in pair if not math.isnan(end)]
    assert (min(shown, default=0), max(shown, default=0)) == (
        min(finite, default=0),
        max(finite, default=0),
    )
    assert all(low <= high or math.isnan(low) for low, high in pairs)


# ---- totals of a run


def totals_of(*rows: Row) -> dict[str, Any]:
    return RunTotals().facts(store_of(*rows))


def test_run_totals_count_steps_and_their_rate() -> None:
    facts = totals_of(*((0, 10 + step / 4, step, {"loss": 1.0}) for step in range(9)))
    assert (facts["steps"], facts["steps_per_second"]) == (9, 4.0)
    pieces = [(0, float(step), step, {name: 0.5}) for step in range(4) for name in ("a", "a", "b")]
    assert totals_of(*pieces)["steps"] == 4
    assert totals_of(*((0, float(at), None, {"loss": 1.0}) for at in range(5)))["steps"] == 5
    set_back = [(0, at, step, {"x": 1.0}) for step, at in enumerate((5.0, 1.0, 2.0))]
    assert totals_of(*set_back)["steps_per_second"] == 1.0
    assert RunTotals().facts(MetricStore()) == {}
    epochs: list[Row] = [(0, 3.0 * epoch, epoch, {"accuracy": 0.5}) for epoch in range(3)]
    loops = totals_of(*((0, step / 10, step, {"loss": 1.0}) for step in range(100)), *epochs)
    assert (loops["steps"], loops["steps_per_second"]) == (100, pytest.approx(10))


def test_pauses_between_cells_or_attempts_do_not_count_as_training_time() -> None:
    totals = RunTotals()
    totals.add(store_of(*((0, step / 2, step, {"loss": 1.0}) for step in range(5))))
    cell = store_of(*((0, 1000 + step / 2, step, {"loss": 2.0}) for step in range(5)))
    facts = totals.facts(cell)
    assert (facts["steps"], facts["steps_per_second"]) == (10, 2.0)
    assert facts["curves"] == {"loss": [[1.0, 1.0]] * 5 + [[2.0, 2.0]] * 5}
    cell.resume()
    for step in range(2, 5):
        cell.add(0, 2000 + step / 2, step, {"loss": 3.0})
    facts = totals.facts(cell)
    assert (facts["steps"], facts["steps_per_second"]) == (13, 2.0)


def test_the_last_metrics_have_their_mean_and_spread_over_ranks() -> None:
    largest = 1.5e308
    for values, spread in (
        ((1.0, 3.0), [2.0, 1.0, 3.0]),
        ((1.0, math.inf), [math.inf] * 3),
        ((largest, largest), [pytest.approx(largest), largest, largest]),
    ):
        now: list[Row] = [(rank, 1.0, 1, {"loss": value}) for rank, value in enumerate(values)]
        last = totals_of((0, 0.0, 0, {"loss": 9.0}), *now)["last"]["loss"]
        assert [last["mean"], last["low"], last["high"]] == spread


def test_totals_of_a_run_are_bounded() -> None:
    totals = RunTotals()
    for cell in range(10):
        names = [f"{cell}.{number}" for number in range(MAX_NAMES)]
        totals.add(store_of(*((0, 0.0, step, dict.fromkeys(names, 1.0)) for step in range(60))))
    facts = totals.facts()
    assert len(facts["last"]) == len(facts["curves"]) == MAX_NAMES
    assert max(map(len, facts["curves"].values())) <= MAX_COARSE_PAIRS
