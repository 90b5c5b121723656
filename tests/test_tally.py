"""What a run came to is counted while it goes on, in little memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.record.tally import MAX_BUCKETS, MAX_NAMES, SmallCurve, Tally


def told(*rows: tuple[int, float, float | None, dict[str, float]]) -> dict[str, Any]:
    tally = Tally()
    for row in rows:
        tally.add(*row)
    return tally.facts()


def test_steps_and_their_pace_are_counted() -> None:
    facts = told(*((0, 10 + step / 4, step, {"loss": 1.0}) for step in range(9)))
    assert (facts["steps"], facts["steps_per_second"]) == (9, 4.0)
    pieces = [(0, float(step), step, {name: 0.5}) for step in range(4) for name in ("a", "a", "b")]
    assert told(*pieces)["steps"] == 4
    assert told(*((0, float(at), None, {"loss": 1.0}) for at in range(5)))["steps"] == 5


def test_the_pause_between_two_cells_is_no_training() -> None:
    tally = Tally()
    for begin in (0.0, 1000.0):
        tally.pause()
        for step in range(5):
            tally.add(0, begin + step / 2, step, {"loss": 1.0})
    assert (tally.facts()["steps"], tally.facts()["steps_per_second"]) == (10, 2.0)


def test_a_clock_that_is_set_back_makes_no_pace_below_zero() -> None:
    facts = told((0, 5.0, 0, {"x": 1.0}), (0, 1.0, 1, {"x": 1.0}), (0, 2.0, 2, {"x": 1.0}))
    assert (facts["steps"], facts["steps_per_second"]) == (3, 1.0)


def test_the_loop_with_the_most_steps_is_the_pace() -> None:
    rows = [(0, step / 10, step, {"loss": 1.0}) for step in range(100)]
    epochs = [(0, 3.0 * epoch, epoch, {"accuracy": 0.5}) for epoch in range(3)]
    facts = told(*rows, *epochs)
    assert (facts["steps"], facts["steps_per_second"]) == (100, pytest.approx(10))


@pytest.mark.parametrize(
    ("values", "spread"),
    [
        ((1.0, 3.0), {"mean": 2.0, "low": 1.0, "high": 3.0}),
        ((1.0, math.inf), {"mean": math.inf, "low": math.inf, "high": math.inf}),
        ((1.5e308, 1.5e308), {"mean": pytest.approx(1.5e308), "low": 1.5e308, "high": 1.5e308}),
    ],
    ids=["two ranks", "a rank without a number", "as large as can be"],
)
def test_the_last_numbers_have_their_mean_and_spread_over_ranks(
    values: tuple[float, float], spread: dict[str, float]
) -> None:
    now = [(rank, 1.0, 1, {"loss": value}) for rank, value in enumerate(values)]
    assert told((0, 0.0, 0, {"loss": 9.0}), *now)["last"] == {"loss": spread}


def test_names_without_end_take_no_memory_without_end() -> None:
    facts = told(*((0, 0.0, 0, {f"x{number}": 1.0}) for number in range(1000)))
    assert len(facts["last"]) == len(facts["curves"]) == MAX_NAMES


def test_the_next_run_begins_anew() -> None:
    tally = Tally()
    assert tally.facts() == {}
    tally.add(0, 0.0, 0, {"loss": 1.0})
    tally.clear()
    assert tally.facts() == {}


def test_the_small_curve_is_of_one_rank() -> None:
    facts = told(*((rank, 0.0, 0, {"loss": float(rank)}) for rank in (1, 0)))
    assert facts["curves"] == {"loss": [[1.0, 1.0]]}


NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(NUMBERS, max_size=5 * MAX_BUCKETS))
def test_the_lowest_and_the_highest_number_survive_in_a_small_curve(values: list[float]) -> None:
    curve = SmallCurve()
    for value in values:
        curve.add(value)
    pairs = curve.pairs()
    assert len(pairs) <= MAX_BUCKETS
    finite = [value for value in values if math.isfinite(value)]
    shown = [end for pair in pairs for end in pair if not math.isnan(end)]
    assert (min(shown, default=0), max(shown, default=0)) == (
        min(finite, default=0),
        max(finite, default=0),
    )
    assert all(low <= high or math.isnan(low) for low, high in pairs)
