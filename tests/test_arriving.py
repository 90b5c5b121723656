"""What a rank reads from its flight recorder, and what of it it tells."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from nbddp.train import place
from nbddp.wire.timing_messages import Arrivals
from nbddp.worker import arriving
from nbddp.worker.arriving import BLOCK, MOST_A_SECOND, Arriving
from nbddp.worker.flight_recorder import NCCLS, newest_of

BEGAN = 1_000_000.0  # as time.time() has it
Record = Callable[..., None]


class Recorder:
    """A flight recorder that keeps a few entries, as torch's."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.kept = 10_000
        self.count = 0

    def add(self, number: int, at: float, **facts: Any) -> None:
        """A collective was begun, seconds after the cell."""
        name = facts.pop("name", "gloo:all_reduce")
        self.entries.append(
            {
                "record_id": self.count,
                "pg_id": 0,
                "process_group": ("0", "default_pg"),
                "collective_seq_id": number,
                "profiling_name": name,
                "time_created_ns": round((BEGAN + at) * 1e6) * 1000,
                "input_sizes": [[4]],
                "input_dtypes": ["Float"],
                "retired": True,
            }
            | facts
        )
        self.count += 1
        del self.entries[: -self.kept]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(arriving, "recorded", lambda: list(recorder.entries))
    monkeypatch.setattr(arriving, "_sequence", lambda: recorder.count)
    monkeypatch.setattr(arriving, "_sequences", lambda: {("0", 1): recorder.count})
    return recorder


@pytest.fixture
def told() -> list[Arrivals]:
    return []


@pytest.fixture
def rank(recorder: Recorder, told: list[Arrivals]) -> Arriving:  # noqa: ARG001 - it reads that
    return Arriving(told.append, lambda name: name == "<cell>")


def test_each_collective_is_told_once_with_its_time_and_its_kind(
    rank: Arriving, recorder: Recorder, told: list[Arrivals]
) -> None:
    recorder.add(1, -5.0)
    rank.begin_cell(7, BEGAN)
    recorder.add(2, 0.25)
    recorder.add(3, 0.5, name="gloo:broadcast")
    newest = newest_of(rank.tell())
    recorder.add(4, 0.75)
    rank.read()
    recorder.add(5, 0.8, is_p2p=True)
    rank.end_cell(is_short=False)
    assert newest is not None
    assert str(newest) == "broadcast #3 float [4]"
    first, second = told
    assert (first.cell, first.base, first.is_over) == (7, BEGAN, False)
    assert first.kinds == [
        ["all_reduce", "float [4]", "", True, 0],
        ["broadcast", "float [4]", "", False, 0],
    ]
    assert first.rows == [2, 250_000, 0, 3, 500_000, 1]
    assert (second.rows, second.is_over, second.lost) == ([4, 750_000, 0], True, 0)


def test_between_cells_nothing_is_told(
    rank: Arriving, recorder: Recorder, told: list[Arrivals]
) -> None:
    recorder.add(1, 0.1)
    newest = newest_of(rank.tell())
    assert newest is not None
    assert newest.number == 1
    rank.begin_cell(7, BEGAN + 1)
    rank.tell()
    rank.end_cell(is_short=False)
    assert told == []


def test_a_short_cell_is_read_only_if_it_had_collectives(
    rank: Arriving, recorder: Recorder, told: list[Arrivals], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.begin_cell(1, BEGAN)
    monkeypatch.setattr(arriving, "recorded", lambda: pytest.fail("it was read"))
    rank.end_cell(is_short=True)
    monkeypatch.setattr(arriving, "recorded", lambda: list(recorder.entries))
    rank.begin_cell(2, BEGAN)
    recorder.add(1, 0.1)
    rank.end_cell(is_short=True)
    assert [each.rows for each in told] == [[1, 100_000, 0]]


def test_a_short_script_that_made_a_group_and_ended_it_is_read(
    rank: Arriving, recorder: Recorder, told: list[Arrivals], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arriving, "_sequences", dict)
    rank.begin_cell(1, BEGAN)
    recorder.add(1, 0.1)
    rank.end_cell(is_short=True)
    assert [each.rows for each in told] == [[1, 100_000, 0]]


def test_what_the_recorder_forgot_between_two_reads_is_counted(
    rank: Arriving, recorder: Recorder, told: list[Arrivals]
) -> None:
    recorder.kept = 10
    rank.begin_cell(1, BEGAN)
    for number in range(1, 31):
        recorder.add(number, number / 100)
    rank.tell()
    for number in range(31, 56):
        recorder.add(number, number / 100)
    rank.tell()
    assert [each.lost for each in told] == [20, 15]
    assert told[0].rows[0] == 21
    assert told[1].rows[0] == 46


def test_so_many_are_left_out_in_blocks_that_all_ranks_leave_out_and_counted(
    rank: Arriving, recorder: Recorder, told: list[Arrivals], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "world_size", lambda: 128)
    rank.begin_cell(1, BEGAN)
    for number in range(1, 1001):
        recorder.add(number, number / 1000)
    rank.tell()
    (letter,) = told
    numbers = letter.rows[::3]
    assert len(numbers) <= MOST_A_SECOND // 128
    assert letter.thinned == 1000 - len(numbers)
    assert {number // BLOCK % 8 for number in numbers} == {0}
    assert numbers[: BLOCK - 1] == list(range(1, BLOCK)), "what is told of is told without a gap"


def test_numbers_that_fall_back_begin_another_turn(
    rank: Arriving, recorder: Recorder, told: list[Arrivals]
) -> None:
    rank.begin_cell(1, BEGAN)
    for at, number in enumerate((1, 2, 1, 2)):
        recorder.add(number, float(at))
    rank.tell()
    assert [kind[-1] for kind in told[0].kinds] == [0, 1]
    assert told[0].rows[2::3] == [0, 0, 1, 1]


def test_where_collectives_come_fast_it_is_read_before_the_recorder_forgets(
    rank: Arriving, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    rank.begin_cell(1, BEGAN)
    rank.read()
    now[0] += 0.5
    for number in range(1, 501):
        recorder.add(number, 0.001 * number)
    rank.read()
    now[0] += 0.1
    assert not rank._is_due()
    now[0] += 0.6
    assert rank._is_due()


def test_what_nccl_has_measured_is_told_when_it_is_there(
    rank: Arriving, recorder: Recorder, told: list[Arrivals]
) -> None:
    recorder.count = NCCLS
    rank.begin_cell(7, BEGAN)
    recorder.add(1, 0.1, name="nccl:all_reduce", retired=False)
    recorder.add(2, 0.2, name="nccl:all_gather", retired=False)
    rank.tell()
    recorder.entries[0]["duration_ms"] = 1.5
    rank.tell()
    recorder.entries[1]["duration_ms"] = 0.25
    recorder.add(3, 0.3, name="nccl:all_reduce", duration_ms=2.0)
    rank.end_cell(is_short=False)
    first, second, third = told
    assert (first.durations, first.lost) == ([], 0)
    assert (second.kinds[second.durations[1]][0], second.durations[0]) == ("all_reduce", 1500)
    assert second.rows == []
    names = [third.kinds[kind][0] for kind in third.durations[1::2]]
    assert dict(zip(names, third.durations[::2], strict=True)) == {
        "all_reduce": 2000,
        "all_gather": 250,
    }


def test_what_the_recorder_has_forgotten_is_not_waited_for(
    rank: Arriving, recorder: Recorder
) -> None:
    recorder.count, recorder.kept = NCCLS, 3
    rank.begin_cell(7, BEGAN)
    for number in range(1, 9):
        recorder.add(number, 0.1 * number, name="nccl:all_reduce")
        rank.read()
    assert len(rank._unmeasured) == 3


def test_a_rank_that_calls_nccl_for_the_first_time_has_lost_nothing(
    rank: Arriving, recorder: Recorder, told: list[Arrivals]
) -> None:
    rank.begin_cell(7, BEGAN)
    recorder.add(1, 0.1)
    rank.tell()
    recorder.count = NCCLS
    recorder.entries.clear()
    recorder.add(1, 0.2, name="nccl:all_reduce")
    rank.tell()
    assert [each.lost for each in told] == [0, 0]
