"""The hang detector: it derives a message from the positions of ranks and the time."""

from dataclasses import replace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from nbddp.record import hang_detector
from nbddp.record.hang_detector import HangDetector, Heartbeat
from nbddp.wire.collective import Collective
from nbddp.wire.messages import RankStatus

ALL = [0, 1, 2]
LATE = hang_detector.SILENT_AFTER + 1


@pytest.fixture
def dog() -> HangDetector:
    dog = HangDetector(is_stopped=lambda rank: rank == 1)
    dog.reset_for_cell(ALL, now=0.0)
    return dog


def waiting(seconds: float = hang_detector.HANG_AFTER, **facts: Any) -> RankStatus:
    return RankStatus(
        cell=5,
        line=3,
        function="all_reduce",
        collective=Collective("all_reduce", 7),
        seconds=seconds,
        **facts,
    )


def elsewhere(seconds: float = hang_detector.HANG_AFTER, **facts: Any) -> RankStatus:
    return RankStatus(cell=5, line=9, function="load", seconds=seconds, **facts)


def look(
    dog: HangDetector, *pulses: RankStatus, now: float = 20.0, running: list[int] = ALL
) -> str:
    """The message of the detector after the first ranks have sent these reports."""
    for rank, pulse in enumerate(pulses):
        dog.heartbeats[rank] = Heartbeat(pulse, now)
    return dog.check(5, running, ALL, now=now)


def hang(dog: HangDetector, now: float = 20.0) -> str:
    return look(dog, waiting(), waiting(), waiting(), now=now)


def test_no_hang_is_reported_while_a_rank_moves_or_computes(dog: HangDetector) -> None:
    assert look(dog, waiting(), waiting(), elsewhere(seconds=hang_detector.HANG_AFTER - 1)) == ""
    assert look(dog, elsewhere(), elsewhere(), elsewhere()) == ""
    busy = [2]
    dog = HangDetector(is_stopped=lambda _rank: False, is_working=lambda rank: rank in busy)
    dog.reset_for_cell(ALL, now=0.0)
    assert look(dog, elsewhere(0.0), elsewhere(0.0), now=LATE) == dog.problem_text == ""
    busy.clear()
    assert "rank 2" in look(dog, now=LATE)


def test_hang_reports_as_text(dog: HangDetector, snapshot: SnapshotAssertion) -> None:
    dog.hang_after = 3.0
    assert look(dog, waiting(2.9), waiting(2.9), elsewhere(2.9), now=4.0) == ""
    assert " 3 s: " in look(dog, waiting(3.0), waiting(3.0), elsewhere(3.0), now=4.0)
    dog.hang_after = hang_detector.HANG_AFTER
    dog.reset_for_cell(ALL, now=0.0)
    texts = {"one never came": look(dog, waiting(), waiting(), elsewhere())}
    dog.reset_for_cell(ALL, now=0.0)
    of_script = [waiting(file="train.py"), elsewhere(file="train.py"), elsewhere(file="train.py")]
    texts["in a script"] = look(dog, *of_script)
    dog.reset_for_cell(ALL, now=0.0)
    texts["one is through"] = look(dog, waiting(), waiting(), running=[0, 1])
    dog.reset_for_cell([0], now=0.0)
    dog.heartbeats[0] = Heartbeat(waiting(), 20.0)
    texts["others are outside"] = dog.check(5, [0], [0], now=20.0, outside=[1, 2])
    dog.reset_for_cell([0], now=0.0)
    for group in ("[0, 1]", "'tensor parallel'"):  # the members of the second one are not known
        in_group = Collective("barrier", 3, group)
        dog.heartbeats[0] = Heartbeat(replace(waiting(), collective=in_group), 20.0)
        texts[f"one is outside {group}"] = dog.check(5, [0], [0], now=20.0, outside=[1, 2])
    dog.likely_causes = lambda: ["ND101 line 9: only some ranks"]
    dog.reset_for_cell(ALL, now=0.0)
    texts["the code has a mistake"] = look(dog, waiting(), waiting(), elsewhere())
    dog.reset_for_cell(ALL, now=0.0)
    texts["one is stopped"] = look(dog, elsewhere(seconds=0.0), now=LATE)
    dog.reset_for_cell([0, 2], now=100.0)
    dog.heartbeats[0] = Heartbeat(elsewhere(seconds=0.0), 100 + LATE)
    texts["one is silent"] = dog.check(5, [0, 2], [0, 2], now=100 + LATE)
    dog.heartbeats[0] = Heartbeat(elsewhere(seconds=0.0), 100.0)
    texts["two are silent"] = dog.check(5, [0, 2], [0, 2], now=100 + LATE)
    dog.heartbeats[2] = Heartbeat(elsewhere(seconds=0.0), 100 + LATE)
    assert dog.check(5, [0, 2], [0, 2], now=100 + LATE) == "", "told with rank 2"
    assert "rank 0:" in dog.problem_text
    assert texts == snapshot


def test_an_alarm_lasts_as_long_as_the_hang_and_is_told_once_per_cell(dog: HangDetector) -> None:
    assert dog.problem_text == ""
    text = hang(dog)
    assert dog.problem_text == text != ""
    assert hang(dog, 21.0) == ""
    assert dog.problem_text == text
    assert look(dog, waiting(), elsewhere(seconds=0.0), now=22.0) == ""  # it moves again
    assert dog.problem_text == ""
    assert hang(dog, 40.0) == ""
    assert dog.problem_text == text
    dog.reset_for_cell(ALL, now=41.0)
    assert dog.problem_text == ""
    assert hang(dog, 60.0) == text
    assert dog.check(6, ALL, ALL, now=60.0) == dog.problem_text == "", "of another cell"
    hang(dog, 61.0)
    dog.clear()
    assert dog.problem_text == ""


def waits(*call: Any) -> RankStatus:
    return RankStatus(cell=5, line=3, function="", collective=Collective(*call))


def went_on(*call: Any, last_cell: int = 5) -> RankStatus:
    last = Collective(*call) if call else None
    return RankStatus(cell=5, line=9, function="load", last=last, last_cell=last_cell)


REDUCE = waits("all_reduce", 3, "", "float [4]")
BROADCAST = ("broadcast", 3, "", "float [4]")
CASES: dict[str, tuple[list[RankStatus], list[RankStatus]]] = {
    "another call": ([REDUCE, *[waits(*BROADCAST)] * 2], []),
    "never came": ([went_on(), REDUCE, REDUCE], []),
    "done": ([REDUCE], [went_on()]),
    "one call behind": ([REDUCE], [went_on("all_reduce", 2, "", "float [4]"), went_on()]),
    "other sizes": ([REDUCE, waits("all_reduce", 3, "", "float [2]")], []),
    "another type, and went on": ([REDUCE], [went_on("all_reduce", 3, "", "double [4]")]),
    "another call, and went on": ([REDUCE, went_on(*BROADCAST)], []),
    "another cell's call": ([REDUCE, went_on(*BROADCAST, last_cell=4)], []),
    "sizes that may differ": ([waits("scatter", 1, "", "float [4]"), waits("scatter", 1)], []),
    "no number": ([waits("recv"), waits("recv")], []),
    "another group's call": (
        [waits("all_reduce", 2, "[0, 2]"), went_on("barrier", 2), went_on()],
        [],
    ),
}


def test_mismatched_collectives_are_described_by_rank(snapshot: SnapshotAssertion) -> None:
    texts = {}
    for name, (running, ended) in CASES.items():
        among, done = dict(enumerate(running)), dict(enumerate(ended, start=len(running)))
        texts[name] = hang_detector.describe_mismatch(5, among, done)
    assert texts == snapshot
