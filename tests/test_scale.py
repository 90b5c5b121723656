"""The numbers beside the axes: round, few, told apart, and short."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbddp.ui.charts.scale import (
    log_ticks,
    padded,
    say_number,
    say_ticks,
    step_ticks,
    value_ticks,
    wants_log,
)


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 2.0, 3.0, 4.0],
        [1e9, 1.0, 1.1, 1.2, 1.3],
        [1.0, 1.1, 1.2, 1e-9],
        [-1.0, 10.0, 100.0, 1e3, 1e4],
        [0.0, 10.0, 100.0, 1e3, 1e4],
        [1e-9, 1.0],
        [],
    ],
)
def test_a_scale_is_linear_where_a_logarithmic_one_would_not_help(values: list[float]) -> None:
    assert not wants_log(values)


@given(st.floats(min_value=-1e300, max_value=1e300), st.floats(min_value=-1e300, max_value=1e300))
def test_value_ticks_are_few_and_within_the_limits_and_told_apart(a: float, b: float) -> None:
    low, high = padded(min(a, b), max(a, b))
    ticks = value_ticks(low, high)
    assert 2 <= len(ticks) <= 5
    assert all(low <= tick <= high for tick in ticks)
    assert len(set(say_ticks(ticks))) == len(ticks)


@given(st.integers(-(2**53), 2**53), st.integers(0, 10**9))
def test_step_ticks_are_whole_numbers_and_told_apart(low: int, span: int) -> None:
    ticks = step_ticks(float(low), float(low + span))
    assert 1 <= len(ticks) <= 6
    assert all(tick.is_integer() for tick in ticks)
    assert len(set(say_ticks(ticks))) == len(ticks)


@pytest.mark.parametrize(
    ("ticks", "texts"),
    [
        ([0.0, 500.0, 1000.0], ["0", "500", "1000"]),
        ([0.0, 5000.0, 10000.0], ["0", "5k", "10k"]),
        ([0.0, 250_000.0, 1_000_000.0], ["0", "0.25M", "1M"]),
        ([1_000_000.0, 1_000_001.0], ["1000000", "1000001"]),
        ([0.99999995, 1.0], ["0.99999995", "1.00000000"]),
        ([0.001, 0.002], ["0.001", "0.002"]),
        ([-0.5, 0.0, 0.5], ["-0.5", "0.0", "0.5"]),
        ([0.0, 2e20], ["0", "2e20"]),
        ([1.5e-7, 2e-7], ["1.5e-7", "2e-7"]),
        ([], []),
    ],
)
def test_ticks_are_said_in_the_fewest_characters(ticks: list[float], texts: list[str]) -> None:
    assert say_ticks(ticks) == texts


@given(st.floats(-1e300, 1e300) | st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_number_is_said_in_few_characters_and_nearly_right(value: float) -> None:
    text = say_number(value)
    assert len(text) <= 11
    assert float(text) == pytest.approx(value, rel=1e-3, nan_ok=True)


@given(st.floats(-320, 300), st.floats(1.7, 600))
@example(-318.0, 3.0)  # where floats have few digits left
def test_logarithmic_ticks_are_few_and_within_the_limits(low: float, span: float) -> None:
    ticks = log_ticks(low, min(low + span, 308))
    assert 1 <= len(ticks) <= 6
    assert ticks == sorted(set(ticks))
    assert all(low <= math.log10(tick) <= low + span for tick in ticks)
