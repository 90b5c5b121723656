"""A beat is the same for whoever asks for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.worker.beats import last_beat

PERIODS = st.sampled_from([0.05, 0.1, 0.4, 1.0])
TIMES = st.floats(0.0, 1e7)


@given(TIMES, PERIODS)
def test_a_beat_is_no_more_than_a_period_back_and_stays_itself(until: float, period: float) -> None:
    beat = last_beat(until, period)
    assert until - period <= beat + 1e-6
    assert beat <= until + 1e-5
    assert last_beat(beat, period) == pytest.approx(beat, abs=1e-6)
    assert last_beat(beat + period, period) == pytest.approx(beat + period, abs=1e-6)
