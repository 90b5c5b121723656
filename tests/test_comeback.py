"""Whether to start again after a failure, and how many steps that cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.lifecycle.comeback import Comeback, Setback, why_stop


def setback(step: float | None, attempt: int = 1) -> Setback:
    return Setback(attempt=attempt, what="rank 1 is gone", at=10.0, step=step)


def comeback(step: float | None) -> Comeback:
    return Comeback(setback=setback(step), detected=0.1, restarted=0.2, replayed=0.3, cells=2)


def test_a_failure_is_worth_as_many_restarts_as_are_allowed() -> None:
    assert why_stop([setback(3)], 1) == ""
    assert why_stop([setback(3), setback(5)], 2) == ""
    assert why_stop([setback(3), setback(5)], 1) == "the restart was used up"
    assert why_stop([setback(3), setback(5), setback(7)], 2) == "the 2 restarts were used up"
    assert why_stop([setback(3)], 0) == "no restart was allowed"


@pytest.mark.parametrize(
    ("step", "where"), [(30, "at step 30"), (None, "before the first step"), (0, "at step 0")]
)
def test_a_failure_at_the_same_step_twice_in_a_row_ends_it_early(
    step: float | None, where: str
) -> None:
    assert why_stop([setback(step), setback(step)], 9) == (
        f"it failed {where} twice in a row: starting again would not help"
    )


def test_the_same_step_with_progress_in_between_does_not() -> None:
    assert why_stop([setback(30), setback(40), setback(30)], 9) == ""


def test_steps_between_the_checkpoint_and_the_failure_are_lost() -> None:
    assert comeback(34).lost(31) == 4
    assert comeback(30).lost(31) == 0
    assert comeback(30).lost(0) == 31
    assert comeback(None).lost(0) is None


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_no_step_is_lost_twice(last: int, first: int) -> None:
    lost = comeback(last).lost(first)
    assert lost is not None
    assert 0 <= lost <= last + 1
