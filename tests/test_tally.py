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


def test_where_nothing_was_reported_there_is_nothing_to_say() -> None:
    assert Tally().facts() == {}


def test_steps_and_their_pace_are_counted() -> None:
    facts = told(*((0, 10 + step / 4, step, {"loss": 1.0}) for step in range(9)))
    assert (facts["steps"], facts["steps_per_second"]) == (9, 4.0)


def test_a_step_that_is_reported_in_pieces_is_one() -> None:
    rows = [(0, float(step), step, {name: 0.5}) for step in range(4) for name in ("loss", "loss")]
    assert told(*rows)["steps"] == 4


def test_steps_that_count_by_themselves_are_counted_too() -> None:
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


def test_the_last_numbers_have_their_mean_and_spread_over_ranks() -> None:
    facts = told((0, 0.0, 0, {"loss": 9.0}), (0, 1.0, 1, {"loss": 1.0}), (1, 1.0, 1, {"loss": 3.0}))
    assert facts["last"] == {"loss": {"mean": 2.0, "low": 1.0, "high": 3.0}}


def test_a_rank_without_a_number_is_not_averaged_away() -> None:
    facts = told((0, 0.0, 0, {"loss": 1.0}), (1, 0.0, 0, {"loss": math.inf}))
    assert facts["last"]["loss"] == {"mean": math.inf, "low": math.inf, "high": math.inf}


def test_the_mean_of_numbers_as_large_as_can_be_is_a_number() -> None:
    facts = told((0, 0.0, 0, {"loss": 1.5e308}), (1, 0.0, 0, {"loss": 1.5e308}))
    assert facts["last"]["loss"]["mean"] == pytest.approx(1.5e308)


def test_names_without_end_take_no_memory_without_end() -> None:
    facts = told(*((0, 0.0, 0, {f"x{number}": 1.0}) for number in range(1000)))
    assert len(facts["last"]) == len(facts["curves"]) == MAX_NAMES


def test_the_next_run_begins_anew() -> None:
    tally = Tally()
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
