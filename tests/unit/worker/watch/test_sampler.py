"""Between cells a rank gives few signs of life: when something has changed, and now and then."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from nbddp.wire.collective_arrivals import CollectiveArrivals
from nbddp.wire.messages import RankStatus, ResourceUsage
from nbddp.worker.watch.sampler import Sampler


class RecordingSampler(Sampler):
    """The samples that a test took, and the messages posted for them."""

    def __init__(self) -> None:
        self.posted: list[RankStatus | CollectiveArrivals] = []
        self.usage = ResourceUsage(cpu=0.5, memory=300_000_000)
        log = Mock(print_count=0, position=lambda: 0)
        sink = Mock(report_count=0, steps={})
        usage = Mock(read=lambda: self.usage)
        super().__init__(self.posted.append, lambda _: False, str, usage, log, sink, str)
        self.sample_once()  # the first look between cells has no CPU
        self.posted.clear()
        self.force_next_status()

    def sample_once(self, *, is_due: bool = False, **change: float) -> int:
        """Sample once between cells. Return the number of messages posted so far."""
        self.usage = replace(self.usage, **change)
        self.sample_between_cells(is_due=is_due)
        return len(self.posted)


@pytest.fixture
def sampler() -> RecordingSampler:
    return RecordingSampler()


def test_an_unchanged_sample_is_sent_once_and_when_due(sampler: RecordingSampler) -> None:
    assert [sampler.sample_once() for _ in range(5)] == [1] * 5
    assert sampler.sample_once(is_due=True) == 2
    assert sampler.sample_once(cpu=1.9, memory=301_000_000) == 2


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
def test_a_changed_sample_is_sent_at_once(
    sampler: RecordingSampler, change: dict[str, float]
) -> None:
    assert [sampler.sample_once(), sampler.sample_once(**change)] == [1, 2]


def test_a_sample_that_spans_a_short_cell_has_no_cpu_usage(sampler: RecordingSampler) -> None:
    sampler.sample_once(cpu=45.0)
    sampler.begin_cell(3)
    sampler.end_cell()
    for _ in range(2):
        sampler.sample_between_cells(is_due=True)
    shown = [each.cpu for each in sampler.posted if isinstance(each, RankStatus)]
    assert shown == [45.0, -1.0, 45.0]


def test_a_sample_is_sent_again_after_a_cell(sampler: RecordingSampler) -> None:
    sampler._send(sampler.sample(cell=3))
    assert sampler.sample_once() == 2
    sampler.begin_cell(4)  # which is too short to be looked at
    sampler.end_cell()
    assert sampler.sample_once() == 3
