"""Ranks that began at different moments do things at the same one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.worker import beats as room
from nbddp.worker.beats import last_beat, until_beat

PERIODS = st.sampled_from([0.05, 0.1, 0.4, 1.0])
TIMES = st.floats(0.0, 1e7)


@given(TIMES, PERIODS)
def test_a_beat_is_no_more_than_a_period_back_and_stays_itself(until: float, period: float) -> None:
    beat = last_beat(until, period)
    assert until - period <= beat + 1e-6
    assert beat <= until + 1e-5
    assert last_beat(beat, period) == pytest.approx(beat, abs=1e-6)
    assert last_beat(beat + period, period) == pytest.approx(beat + period, abs=1e-6)


@given(TIMES, PERIODS)
def test_whoever_waits_for_a_beat_waits_about_a_period(now: float, period: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room.time, "monotonic", lambda: now)
        wait = until_beat(period)
    assert 0.5 * period - 1e-5 <= wait <= 1.5 * period + 1e-5


@given(TIMES, st.floats(0.0, 0.4))
def test_two_that_began_apart_wake_at_once(now: float, apart: float) -> None:
    beat = last_beat(now, 1.0)  # both look right after it, and wait for the next one
    ends = []
    with pytest.MonkeyPatch.context() as patch:
        for at in (beat + 0.01, beat + 0.01 + apart):
            patch.setattr(room.time, "monotonic", lambda at=at: at)
            ends.append(at + until_beat(1.0))
    assert ends[0] == pytest.approx(ends[1], abs=1e-6)
