"""The entries that a rank reads from its flight recorder, and the reports it sends."""

import pickle
import time
from typing import Any

import pytest
from fakes import recorder_entry

from nbddp.reporting import this_rank
from nbddp.wire.collective_arrivals import CollectiveArrivals
from nbddp.worker.watch import arrival_recorder, flight_recorder
from nbddp.worker.watch.arrival_recorder import BLOCK, MAX_ROWS_PER_SECOND, ArrivalRecorder
from nbddp.worker.watch.flight_recorder import newest_of

BEGAN = 1_000_000.0  # as time.time() has it


class Rank(ArrivalRecorder):
    """A rank with a flight recorder that keeps a few entries, as torch's. It keeps its reports."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.kept, self.count, self.recorder = 10_000, 0, "shared"
        self.sent: list[CollectiveArrivals] = []
        super().__init__(self.sent.append, lambda name: name == "<cell>", lambda _name: "")

    def add(self, number: int, at: float, **facts: Any) -> None:
        """Record a collective that began some seconds after the cell."""
        began = {"collective_seq_id": number, "time_created_ns": round((BEGAN + at) * 1e6) * 1000}
        entry = recorder_entry(record_id=self.count, **began, **facts)
        dump = pickle.dumps({"entries": [entry]})
        self.entries += flight_recorder._load_entries(self.recorder, dump)
        self.count += 1
        del self.entries[: -self.kept]

    def read(self) -> None:
        self._read(flight_recorder.read_entries())


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    rank = Rank()
    monkeypatch.setattr(flight_recorder, "read_entries", lambda: list(rank.entries))
    monkeypatch.setattr(flight_recorder, "count_started", lambda: rank.count)
    monkeypatch.setattr(arrival_recorder, "_count_all_started", lambda: {("0", 1): rank.count})
    return rank


def test_each_collective_is_reported_once_with_its_time_and_its_kind(rank: Rank) -> None:
    rank.add(1, -5.0)
    rank.begin_cell(7, BEGAN)
    rank.add(2, 0.25)
    rank.add(3, 0.5, profiling_name="gloo:broadcast")
    newest = newest_of(rank.report())
    rank.add(4, 0.75)
    rank.read()
    rank.add(5, 0.8, is_p2p=True)
    rank.end_cell(is_short=False)
    assert str(newest.call) == "broadcast #3 float [4]"
    first, second = rank.sent
    assert (first.cell, first.base, first.is_over) == (7, BEGAN, False)
    assert first.kinds == [
        ["all_reduce", "float [4]", "", True, 0],
        ["broadcast", "float [4]", "", False, 0],
    ]
    assert first.rows == [2, 250_000, 0, 3, 500_000, 1]
    assert (second.rows, second.is_over, second.lost) == ([4, 750_000, 0], True, 0)


def test_no_collectives_are_reported_between_cells(rank: Rank) -> None:
    rank.add(1, 0.1)
    newest = newest_of(rank.report())
    assert newest.call.number == 1
    rank.begin_cell(7, BEGAN + 1)
    rank.report()
    rank.end_cell(is_short=False)
    assert rank.sent == []


def test_the_recorder_is_read_after_a_short_cell_only_if_it_had_collectives_or_its_own_group(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.begin_cell(1, BEGAN)
    with monkeypatch.context() as patch:
        patch.setattr(flight_recorder, "read_entries", lambda: pytest.fail("it was read"))
        rank.end_cell(is_short=True)
    rank.begin_cell(2, BEGAN)
    rank.add(1, 0.1)
    rank.end_cell(is_short=True)
    # as after a script that made a group and ended it
    monkeypatch.setattr(arrival_recorder, "_count_all_started", dict)
    rank.begin_cell(3, BEGAN)
    rank.add(1, 0.2)
    rank.end_cell(is_short=True)
    assert [each.rows for each in rank.sent] == [[1, 100_000, 0], [1, 200_000, 0]]


def test_entries_lost_by_the_flight_recorder_between_reads_are_counted(rank: Rank) -> None:
    rank.kept = 10
    rank.begin_cell(1, BEGAN)
    for number in range(1, 31):
        rank.add(number, number / 100)
    rank.report()
    for number in range(31, 56):
        rank.add(number, number / 100)
    rank.report()
    assert [each.lost for each in rank.sent] == [20, 15]
    assert rank.sent[0].rows[0] == 21
    assert rank.sent[1].rows[0] == 46


def test_too_many_collectives_are_omitted_in_the_same_blocks_on_all_ranks_and_counted(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_rank, "world_size", lambda: 128)
    rank.begin_cell(1, BEGAN)
    for number in range(1, 1001):
        rank.add(number, number / 1000)
    rank.report()
    (message,) = rank.sent
    numbers = message.rows[::3]
    assert len(numbers) <= MAX_ROWS_PER_SECOND // 128
    assert message.omitted == 1000 - len(numbers)
    assert {number // BLOCK % 8 for number in numbers} == {0}
    assert numbers[: BLOCK - 1] == list(range(1, BLOCK)), "what is told of is told without a gap"


def test_collectives_of_a_new_process_group_get_a_new_kind(rank: Rank) -> None:
    rank.begin_cell(1, BEGAN)
    for at, number in enumerate((1, 2, 1, 2)):
        rank.add(number, float(at))
    rank.report()
    assert [kind[-1] for kind in rank.sent[0].kinds] == [0, 1]
    assert rank.sent[0].rows[2::3] == [0, 0, 1, 1]


def test_the_recorder_is_read_more_often_if_collectives_are_frequent(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    rank.begin_cell(1, BEGAN)
    rank.read()
    now[0] += 0.5
    for number in range(1, 501):
        rank.add(number, 0.001 * number)
    rank.read()
    rank.add(501, 0.6)
    for seconds, newest in ((0.1, 499), (0.6, 500)):
        now[0] += seconds
        rank.sample()
        assert rank._newest_records == {"shared": newest}


def test_nccl_durations_are_reported_once_they_are_measured(rank: Rank) -> None:
    rank.begin_cell(7, BEGAN)
    rank.add(1, 0.1, profiling_name="nccl:all_reduce", retired=False)
    rank.add(2, 0.2, profiling_name="nccl:all_gather", retired=False)
    rank.report()
    rank.entries[0]["duration_ms"] = 1.5
    rank.report()
    rank.entries[1]["duration_ms"] = 0.25
    rank.add(3, 0.3, profiling_name="nccl:all_reduce", duration_ms=2.0)
    rank.end_cell(is_short=False)
    first, second, third = rank.sent
    assert (first.durations, first.lost) == ([], 0)
    assert (second.kinds[second.durations[1]][0], second.durations[0]) == ("all_reduce", 1500)
    assert second.rows == []
    names = [third.kinds[kind][0] for kind in third.durations[1::2]]
    durations = dict(zip(names, third.durations[::2], strict=True))
    assert durations == {"all_reduce": 2000, "all_gather": 250}


def test_durations_of_dropped_recorder_entries_are_not_awaited(rank: Rank) -> None:
    rank.kept = 3
    rank.begin_cell(7, BEGAN)
    for number in range(1, 9):
        rank.add(number, 0.1 * number, profiling_name="nccl:all_reduce")
        rank.read()
    assert len(rank._unmeasured) == 3


def test_lost_collectives_are_counted_for_each_recorder(rank: Rank) -> None:
    rank.begin_cell(7, BEGAN)
    rank.add(1, 0.1)
    rank.report()
    rank.recorder, rank.count = "nccl", 5
    rank.add(1, 0.2, profiling_name="nccl:all_reduce")
    rank.report()
    rank.count += 3
    rank.add(5, 0.3, profiling_name="nccl:all_reduce")
    rank.report()
    assert [message.lost for message in rank.sent] == [0, 0, 3]
