"""The lookout: what each rank said of itself last, and what follows from it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.record.hangs import HANG_AFTER
from nbddp.record.whereabouts import Bar, Lookout
from nbddp.wire.messages import Metrics, Progress, Pulse


@pytest.fixture
def lookout() -> Lookout:
    lookout = Lookout(is_stopped=lambda _rank: False)
    lookout.begin_cell([0, 1], now=0.0)
    return lookout


def pulse(seconds: float = 0.0) -> Pulse:
    return Pulse(cell=5, line=3, function="step", collective="all_reduce #7", seconds=seconds)


def numbers(*steps: int, missed: int = 0) -> Metrics:
    rows = [[100.0 + step, step, {"loss": 1.0 / (1 + step)}] for step in steps]
    return Metrics(rows=rows, missed=missed)


# ---- a bar


@pytest.mark.parametrize(
    ("bar", "per_second", "left"),
    [
        (Bar("", 20, 80, 4.0), 5.0, 12.0),
        (Bar("", 80, 80, 4.0), 20.0, 0.0),
        (Bar("", 20, 0, 4.0), 5.0, None),
        (Bar("", 0, 80, 4.0), 0.0, None),
        (Bar("", 20, 80, 0.0), 0.0, None),
        (Bar("", 90, 80, 4.5), 20.0, 0.0),
    ],
    ids=["half", "through", "no total", "not begun", "no time", "longer than said"],
)
def test_a_bar_says_how_fast_it_goes_and_how_long_it_will_take(
    bar: Bar, per_second: float, left: float | None
) -> None:
    assert bar.per_second == per_second
    assert bar.seconds_left == left


@given(
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.just(0.0) | st.floats(0.001, 1e9),  # as a bar reports it
)
def test_a_bar_takes_its_whole_time_at_its_own_rate(done: int, total: int, seconds: float) -> None:
    bar = Bar("", done, total, seconds)
    assert bar.per_second >= 0
    left = bar.seconds_left
    if left is None:
        assert not (done and total and bar.per_second)
    elif done <= total:
        assert math.isclose((seconds + left) * done, seconds * total, rel_tol=1e-6)
    else:
        assert left == 0


# ---- what ranks say


def test_the_last_sign_of_life_is_kept_with_its_time(lookout: Lookout) -> None:
    lookout.note(1, pulse(1.0), now=3.0)
    lookout.note(1, pulse(2.0), now=4.0)
    sign = lookout.sign(1)
    assert sign is not None
    assert (sign.pulse, sign.at) == (pulse(2.0), 4.0)
    assert lookout.sign(7) is None


def test_the_memory_is_that_of_all_ranks_together(lookout: Lookout) -> None:
    for rank in range(2):
        lookout.note(rank, Pulse(cell=5, line=3, function="", memory=1 << 20), now=1.0)
    assert lookout.memory() == 2 << 20


def test_rows_become_curves_of_their_rank(lookout: Lookout) -> None:
    lookout.note(1, numbers(0, 1), now=1.0)
    lookout.note(1, numbers(2), now=2.0)
    lookout.note(0, numbers(0), now=2.0)
    curves = lookout.curves.curves("loss")
    assert curves[1].steps == (0.0, 1.0, 2.0)
    assert curves[0].steps == (0.0,)
    pace = lookout.curves.pace(1)
    assert pace is not None
    assert (pace.step, pace.at) == (2.0, 102.0)


def test_rows_that_are_missing_are_counted_over_all_ranks(lookout: Lookout) -> None:
    lookout.note(0, numbers(0, missed=3), now=1.0)
    lookout.note(1, numbers(0, missed=4), now=1.0)
    assert lookout.missed == 7


def test_the_bars_of_a_rank_are_those_that_it_named_last(lookout: Lookout) -> None:
    outer, inner = ["epochs", 1, 3, 9.0], ["batches", 10, 0, 2.5]
    lookout.note(0, Progress(bars=[outer, inner]), now=1.0)
    assert lookout.bars(0) == (Bar("epochs", 1, 3, 9.0), Bar("batches", 10, 0, 2.5))
    assert lookout.bars(1) == ()
    lookout.note(0, Progress(bars=[outer]), now=2.0)
    assert lookout.bars(0) == (Bar("epochs", 1, 3, 9.0),)


def test_the_version_is_another_after_anything_that_was_said(lookout: Lookout) -> None:
    seen = [lookout.version]
    for message in (pulse(), numbers(0), Progress(bars=[]), pulse()):
        lookout.note(0, message, now=1.0)
        seen.append(lookout.version)
    assert len(set(seen)) == 5
    lookout.sign(0)
    lookout.bars(0)
    assert lookout.version == seen[-1]


# ---- cells


def test_a_new_cell_begins_without_what_an_earlier_one_said(lookout: Lookout) -> None:
    lookout.note(0, numbers(0, missed=2), now=1.0)
    lookout.note(0, Progress(bars=[["x", 1, 2, 1.0]]), now=1.0)
    lookout.note(0, pulse(30.0), now=1.0)
    lookout.begin_cell([0, 1], now=2.0)
    assert lookout.missed == 0
    assert lookout.curves.names() == []
    assert lookout.bars(0) == ()
    sign = lookout.sign(0)
    assert sign is not None
    assert (sign.pulse.cell, sign.at) == (0, 2.0)


def test_a_hang_is_told_once_and_stays_an_alarm_until_the_cell_is_over(lookout: Lookout) -> None:
    for rank in range(2):
        lookout.note(rank, pulse(HANG_AFTER), now=20.0)
    text = lookout.look(5, [0, 1], [0, 1], now=20.0)
    assert text.startswith("no progress for 10 s")
    assert lookout.look(5, [0, 1], [0, 1], now=21.0) == ""
    assert lookout.alarm == text
    lookout.end_cell()
    assert lookout.alarm == ""


def test_numbers_outlast_their_cell_and_signs_do_not_outlast_their_ranks(lookout: Lookout) -> None:
    lookout.note(0, numbers(0), now=1.0)
    lookout.end_cell()
    assert lookout.curves.names() == ["loss"]
    lookout.forget()
    assert lookout.sign(0) is None
    assert lookout.curves.names() == ["loss"]
