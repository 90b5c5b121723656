"""Between cells a rank gives few signs of life: when something has changed, and now and then."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from nbddp.wire.messages import RankStatus
from nbddp.wire.timing_messages import CollectiveArrivals
from nbddp.worker.watch.resource_usage import ResourceUsage, UsageSampler
from nbddp.worker.watch.sampler import Sampler


class FakeUsage(UsageSampler):
    """Uses what a test says."""

    def __init__(self) -> None:
        self.now = ResourceUsage(cpu=0.5, memory=300_000_000)

    def read(self) -> ResourceUsage:
        return self.now


class Pulses(Sampler):
    """Looks that a test has made, and what was posted of them."""

    def __init__(self) -> None:
        self.posted: list[RankStatus | CollectiveArrivals] = []
        self.usage = FakeUsage()
        shell = Mock(is_cell_file=lambda _file: False)
        super().__init__(self.posted.append, shell, self.usage)
        self.news()  # the first look between cells has no CPU
        self.posted.clear()
        self.force_next_status()

    def news(self, *, is_due: bool = False, **change: float) -> int:
        """Look once more between cells; how much was posted by then."""
        self.usage.now = replace(self.usage.now, **change)
        self.sample_between_cells(is_due=is_due)
        return len(self.posted)


@pytest.fixture
def pulses() -> Pulses:
    return Pulses()


def test_what_has_not_changed_is_told_once_and_when_it_is_due(pulses: Pulses) -> None:
    assert [pulses.news() for _ in range(5)] == [1] * 5
    assert pulses.news(is_due=True) == 2
    assert pulses.news(cpu=1.9, memory=301_000_000) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"cpu": 60.0},
        {"memory": 310_000_000},
        {"memory": 200_000_000},
        {"gpu_memory": 1},
        {"gpu_reserved": 1},
    ],
    ids=str,
)
def test_what_has_changed_is_told_at_the_next_look(
    pulses: Pulses, change: dict[str, float]
) -> None:
    assert [pulses.news(), pulses.news(**change)] == [1, 2]


def test_a_look_that_spans_a_short_cell_tells_no_cpu(pulses: Pulses) -> None:
    pulses.news(cpu=45.0)
    pulses.begin_cell(3)
    pulses.end_cell()
    for _ in range(2):
        pulses.sample_between_cells(is_due=True)
    shown = [each.cpu for each in pulses.posted if isinstance(each, RankStatus)]
    assert shown == [45.0, -1.0, 45.0]


def test_what_was_told_before_or_in_a_cell_is_old_after_it(pulses: Pulses) -> None:
    pulses._send(pulses.sample(cell=3))
    assert pulses.news() == 2
    pulses.begin_cell(4)  # which is too short to be looked at
    pulses.end_cell()
    assert pulses.news() == 3
