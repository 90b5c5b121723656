"""The hang_watch: told where ranks are and what time it is, it says what the user should know."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbddp.record.hangs import HANG_AFTER, SILENT_AFTER, HangWatch, Sign
from nbddp.wire.messages import Pulse


@pytest.fixture
def dog() -> HangWatch:
    dog = HangWatch(is_stopped=lambda rank: rank == 1)
    dog.begin_cell([0, 1, 2], now=0.0)
    return dog


def waiting(line: int = 3, seconds: float = HANG_AFTER) -> Pulse:
    return Pulse(
        cell=5, line=line, function="all_reduce", collective="all_reduce #7", seconds=seconds
    )


def elsewhere(seconds: float = HANG_AFTER) -> Pulse:
    return Pulse(cell=5, line=9, function="load", seconds=seconds)


def note_all(dog: HangWatch, *pulses: Pulse, now: float) -> None:
    for rank, pulse in enumerate(pulses):
        dog.note(rank, pulse, now)


def test_ranks_that_move_are_left_alone(dog: HangWatch) -> None:
    note_all(dog, waiting(), waiting(), elsewhere(seconds=HANG_AFTER - 1), now=20.0)
    assert dog.look(5, [0, 1, 2], [0, 1, 2], now=20.0) == ""


def test_a_long_computation_without_any_collective_is_no_hang(dog: HangWatch) -> None:
    note_all(dog, elsewhere(), elsewhere(), elsewhere(), now=20.0)
    assert dog.look(5, [0, 1, 2], [0, 1, 2], now=20.0) == ""


def test_a_hang_names_who_waits_and_who_never_came(dog: HangWatch) -> None:
    note_all(dog, waiting(), waiting(), elsewhere(), now=20.0)
    assert dog.look(5, [0, 1, 2], [0, 1, 2], now=20.0).splitlines()[1:3] == [
        "  ranks 0-1 waiting in all_reduce #7, line 3",
        "  rank 2 never came: line 9 in load()",
    ]


def test_a_hang_in_a_script_names_its_file(dog: HangWatch) -> None:
    pulses = [replace(each, file="train.py") for each in (waiting(), elsewhere())]
    note_all(dog, *pulses, now=20.0)
    assert dog.look(5, [0, 1], [0, 1], now=20.0).splitlines()[1:3] == [
        "  rank 0 waiting in all_reduce #7, train.py line 3",
        "  rank 1 never came: train.py line 9 in load()",
    ]


def test_a_rank_that_holds_pythons_lock_and_computes_is_left_alone() -> None:
    busy = [2]
    dog = HangWatch(is_stopped=lambda _rank: False, is_working=lambda rank: rank in busy)
    dog.begin_cell([0, 1, 2], now=0.0)
    late = SILENT_AFTER + 1
    dog.note(0, elsewhere(seconds=0.0), late)
    dog.note(1, elsewhere(seconds=0.0), late)
    assert dog.look(5, [0, 1, 2], [0, 1, 2], now=late) == dog.alarm == ""
    busy.clear()
    assert "from rank 2: in code that holds" in dog.look(5, [0, 1, 2], [0, 1, 2], now=late)


def test_how_long_nothing_may_move_can_be_said(dog: HangWatch) -> None:
    dog.hang_after = 3.0
    note_all(dog, waiting(seconds=3.0), waiting(seconds=3.0), elsewhere(seconds=3.0), now=4.0)
    text = dog.look(5, [0, 1, 2], [0, 1, 2], now=4.0)
    first = "no progress for 3 s: ranks 0-1 called all_reduce #7, rank 2 never came"
    assert text.splitlines()[0] == first


def test_a_rank_that_is_through_will_not_come(dog: HangWatch) -> None:
    note_all(dog, waiting(), waiting(), now=20.0)
    text = dog.look(5, [0, 1], [0, 1, 2], now=20.0)
    assert "  rank 2 done with the cell: will not come" in text.splitlines()


def test_the_same_news_is_told_once_in_a_cell(dog: HangWatch) -> None:
    note_all(dog, waiting(), waiting(), waiting(), now=20.0)
    assert dog.look(5, [0, 1, 2], [0, 1, 2], now=20.0)
    assert dog.look(5, [0, 1, 2], [0, 1, 2], now=21.0) == ""
    dog.begin_cell([0, 1, 2], now=22.0)
    note_all(dog, waiting(), waiting(), waiting(), now=40.0)
    assert dog.look(5, [0, 1, 2], [0, 1, 2], now=40.0)


def test_news_of_another_cell_is_no_hang_of_this_one(dog: HangWatch) -> None:
    note_all(dog, waiting(), waiting(), waiting(), now=20.0)
    assert dog.look(6, [0, 1, 2], [0, 1, 2], now=20.0) == ""


def test_a_rank_without_a_sign_of_life_is_named_stopped_ones_first(dog: HangWatch) -> None:
    late = SILENT_AFTER + 1
    dog.note(0, elsewhere(seconds=0.0), late)
    text = dog.look(5, [0, 1, 2], [0, 1, 2], now=late)
    assert text == "no sign of life from rank 1: stopped (SIGSTOP); `%ddp kill 1` ends it"
    dog.begin_cell([0, 2], now=100.0)
    dog.note(0, elsewhere(seconds=0.0), 100 + late)
    text = dog.look(5, [0, 2], [0, 2], now=100 + late)
    assert text.startswith("no sign of life from rank 2: in code that holds Python's lock")


# ---- the alarm: what is wrong right now, told before or not


def hang(dog: HangWatch, now: float) -> str:
    note_all(dog, waiting(), waiting(), waiting(), now=now)
    return dog.look(5, [0, 1, 2], [0, 1, 2], now=now)


def test_an_alarm_stays_as_long_as_a_hang_does(dog: HangWatch) -> None:
    assert dog.alarm == ""
    text = hang(dog, 20.0)
    assert dog.alarm == text
    assert text.startswith("no progress for 10 s")
    assert hang(dog, 21.0) == ""
    assert dog.alarm == text


def test_an_alarm_is_gone_when_a_rank_moves_again(dog: HangWatch) -> None:
    hang(dog, 20.0)
    dog.note(1, elsewhere(seconds=0.0), now=21.0)
    assert dog.look(5, [0, 1, 2], [0, 1, 2], now=21.0) == ""
    assert dog.alarm == ""


def test_an_alarm_comes_back_without_being_told_twice(dog: HangWatch) -> None:
    text = hang(dog, 20.0)
    dog.note(1, elsewhere(seconds=0.0), now=21.0)
    dog.look(5, [0, 1, 2], [0, 1, 2], now=21.0)
    assert hang(dog, 40.0) == ""
    assert dog.alarm == text


def test_a_silent_rank_is_an_alarm_until_it_speaks(dog: HangWatch) -> None:
    late = SILENT_AFTER + 1
    for rank in (0, 2):
        dog.note(rank, elsewhere(seconds=0.0), late)
    text = dog.look(5, [0, 1, 2], [0, 1, 2], now=late)
    assert dog.alarm == text
    assert "no sign of life from rank 1" in text
    dog.note(1, elsewhere(seconds=0.0), late + 1)
    assert dog.look(5, [0, 1, 2], [0, 1, 2], now=late + 1) == ""
    assert dog.alarm == ""


def test_no_alarm_outlasts_its_cell_or_its_ranks(dog: HangWatch) -> None:
    hang(dog, 20.0)
    dog.begin_cell([0, 1, 2], now=21.0)
    assert dog.alarm == ""
    hang(dog, 40.0)
    dog.forget()
    assert dog.alarm == ""


def test_the_memory_is_that_of_all_ranks_when_they_were_last_seen(dog: HangWatch) -> None:
    assert dog.memory() == 0
    for memory in (1 << 30, 2 << 30):
        dog.note(0, Pulse(cell=5, line=3, function="", memory=memory), now=1.0)
    dog.note(1, Pulse(cell=5, line=3, function="", memory=1 << 20), now=1.0)
    assert dog.memory() == (2 << 30) + (1 << 20)


def test_the_last_sign_of_a_rank_is_kept_until_its_ranks_are_gone(dog: HangWatch) -> None:
    assert dog.sign(7) is None
    assert dog.sign(1) == Sign(Pulse(cell=0, line=0, function=""), 0.0)
    dog.note(1, waiting(), now=3.0)
    assert dog.sign(1) == Sign(waiting(), 3.0)
    dog.begin_cell([0], now=4.0)
    assert dog.sign(1) == Sign(waiting(), 3.0)
    dog.forget()
    assert dog.sign(1) is None
