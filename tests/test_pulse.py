"""Between cells a rank gives few signs of life: when something has changed, and now and then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbddp.wire.messages import Pulse
from nbddp.wire.timing_messages import Arrivals
from nbddp.worker.pulse import PulseThread
from nbddp.worker.usage import Usage, Use


class FakeUsage(Usage):
    """Uses what a test says."""

    def __init__(self) -> None:
        self.now = Use(cpu=0.5, memory=300_000_000)

    def read(self) -> Use:
        return self.now


@pytest.fixture
def posted() -> list[Pulse | Arrivals]:
    return []


@pytest.fixture
def usage() -> FakeUsage:
    return FakeUsage()


@pytest.fixture
def pulses(posted: list[Pulse | Arrivals], usage: FakeUsage) -> PulseThread:
    return PulseThread(posted.append, lambda _file: False, usage)


def test_what_has_not_changed_is_told_once_and_when_it_is_due(
    pulses: PulseThread, posted: list[Pulse | Arrivals], usage: FakeUsage
) -> None:
    for _ in range(5):
        pulses._tell_news(pulses.look(), is_due=False)
    assert len(posted) == 1
    pulses._tell_news(pulses.look(), is_due=True)
    assert len(posted) == 2
    usage.now = replace(usage.now, cpu=1.9, memory=301_000_000)
    pulses._tell_news(pulses.look(), is_due=False)
    assert len(posted) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"cpu": 60.0},
        {"memory": 310_000_000},
        {"memory": 200_000_000},
        {"gpu_memory": 1},
        {"gpu_reserved": 1},
    ],
)
def test_what_has_changed_is_told_at_the_next_look(
    pulses: PulseThread,
    posted: list[Pulse | Arrivals],
    usage: FakeUsage,
    change: dict[str, float],
) -> None:
    pulses._tell_news(pulses.look(), is_due=False)
    usage.now = replace(usage.now, **change)
    pulses._tell_news(pulses.look(), is_due=False)
    assert len(posted) == 2


def test_what_was_told_within_a_cell_is_old_after_it(
    pulses: PulseThread, posted: list[Pulse | Arrivals]
) -> None:
    pulses._tell(pulses.look(cell=3))
    pulses._tell_news(pulses.look(), is_due=False)
    assert len(posted) == 2


def test_after_a_cell_that_was_too_short_to_be_looked_at_it_is_told_again(
    pulses: PulseThread, posted: list[Pulse | Arrivals]
) -> None:
    pulses._tell_news(pulses.look(), is_due=False)
    pulses.begin_cell(1)
    pulses.end_cell()
    pulses._tell_news(pulses.look(), is_due=False)
    assert len(posted) == 2
