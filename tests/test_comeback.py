"""Whether to start again after a failure, and how many steps that cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.lifecycle.comeback import Comeback, Retries, Setback, Way, next_way, why_stop


def setback(step: float | None, attempt: int = 1) -> Setback:
    return Setback(attempt=attempt, what="rank 1 is gone", at=10.0, step=step)


def comeback(step: float | None) -> Comeback:
    return Comeback(setback=setback(step), detected=0.1, restarted=0.2, replayed=0.3, cells=2)


def test_a_failure_is_worth_as_many_restarts_as_are_allowed() -> None:
    assert why_stop([setback(3)], Retries(restarts=1)) == ""
    assert why_stop([setback(3), setback(5)], Retries(restarts=2)) == ""
    assert why_stop([setback(3), setback(5)], Retries(restarts=1)) == "the restart was used up"
    assert (
        why_stop([setback(3), setback(5), setback(7)], Retries(restarts=2))
        == "the 2 restarts were used up"
    )
    assert why_stop([setback(3)], Retries(restarts=0)) == "no restart was allowed"


def death(step: float, way: Way = Way.HEAL) -> Setback:
    return Setback(attempt=1, what="rank 1 is gone", at=0.0, step=step, is_death=True, way=way)


def test_a_death_is_healed_first_and_then_restarted() -> None:
    both = Retries(heals=1, restarts=1)
    assert next_way([death(1)], both) is Way.HEAL
    assert next_way([death(1), death(2)], both) is Way.RESTART
    assert next_way([death(1), death(2, Way.RESTART), death(3)], both) is None
    assert why_stop([death(1), death(2, Way.RESTART), death(3)], both) == (
        "the 1 heal and 1 restart were used up"
    )
    assert why_stop([death(1), death(2)], Retries(heals=1)) == "the heal was used up"


def test_where_all_live_only_a_restart_helps() -> None:
    assert next_way([setback(3)], Retries(heals=3, restarts=1)) is Way.RESTART
    assert why_stop([setback(3)], Retries(heals=3)) == (
        "every rank lives, so that there is none to heal"
    )


@pytest.mark.parametrize(
    ("step", "where"), [(30, "at step 30"), (None, "before the first step"), (0, "at step 0")]
)
def test_a_failure_at_the_same_step_twice_in_a_row_ends_it_early(
    step: float | None, where: str
) -> None:
    assert why_stop([setback(step), setback(step)], Retries(restarts=9)) == (
        f"it failed {where} twice in a row: starting again would not help"
    )


def test_the_same_step_with_progress_in_between_does_not() -> None:
    assert why_stop([setback(30), setback(40), setback(30)], Retries(restarts=9)) == ""


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
