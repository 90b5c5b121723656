"""The watchdog: told where ranks are and what time it is, it says what the user should know."""

from __future__ import annotations

import pytest

from nbddp.controller.watchdog import HANG_AFTER, SILENT_AFTER, Watchdog
from nbddp.wire.messages import Pulse


@pytest.fixture
def dog() -> Watchdog:
    dog = Watchdog(is_stopped=lambda rank: rank == 1)
    dog.begin_cell([0, 1, 2], now=0.0)
    return dog


def waiting(line: int = 3, seconds: float = HANG_AFTER) -> Pulse:
    return Pulse(
        cell=5, line=line, function="all_reduce", collective="all_reduce #7", seconds=seconds
    )


def elsewhere(seconds: float = HANG_AFTER) -> Pulse:
    return Pulse(cell=5, line=9, function="load", seconds=seconds)


def note_all(dog: Watchdog, *pulses: Pulse, now: float) -> None:
    for rank, pulse in enumerate(pulses):
        dog.note(rank, pulse, now)


def test_ranks_that_move_are_left_alone(dog: Watchdog) -> None:
    note_all(dog, waiting(), waiting(), elsewhere(seconds=HANG_AFTER - 1), now=20.0)
    assert dog.look(5, [0, 1, 2], [0, 1, 2], now=20.0) == ""


def test_a_long_computation_without_any_collective_is_no_hang(dog: Watchdog) -> None:
    note_all(dog, elsewhere(), elsewhere(), elsewhere(), now=20.0)
    assert dog.look(5, [0, 1, 2], [0, 1, 2], now=20.0) == ""


def test_a_hang_names_who_waits_and_who_never_came(dog: Watchdog) -> None:
    note_all(dog, waiting(), waiting(), elsewhere(), now=20.0)
    assert dog.look(5, [0, 1, 2], [0, 1, 2], now=20.0).splitlines()[1:3] == [
        "  ranks 0-1 waiting in all_reduce #7, line 3",
        "  rank 2 never came: line 9 in load()",
    ]


def test_a_rank_that_is_through_will_not_come(dog: Watchdog) -> None:
    note_all(dog, waiting(), waiting(), now=20.0)
    text = dog.look(5, [0, 1], [0, 1, 2], now=20.0)
    assert "  rank 2 done with the cell: will not come" in text.splitlines()


def test_the_same_news_is_told_once_in_a_cell(dog: Watchdog) -> None:
    note_all(dog, waiting(), waiting(), waiting(), now=20.0)
    assert dog.look(5, [0, 1, 2], [0, 1, 2], now=20.0)
    assert dog.look(5, [0, 1, 2], [0, 1, 2], now=21.0) == ""
    dog.begin_cell([0, 1, 2], now=22.0)
    note_all(dog, waiting(), waiting(), waiting(), now=40.0)
    assert dog.look(5, [0, 1, 2], [0, 1, 2], now=40.0)


def test_news_of_another_cell_is_no_hang_of_this_one(dog: Watchdog) -> None:
    note_all(dog, waiting(), waiting(), waiting(), now=20.0)
    assert dog.look(6, [0, 1, 2], [0, 1, 2], now=20.0) == ""


def test_a_rank_without_a_sign_of_life_is_named_stopped_ones_first(dog: Watchdog) -> None:
    late = SILENT_AFTER + 1
    dog.note(0, elsewhere(seconds=0.0), late)
    text = dog.look(5, [0, 1, 2], [0, 1, 2], now=late)
    assert text == "no sign of life from rank 1: stopped (SIGSTOP); `%ddp kill 1` ends it"
    dog.begin_cell([0, 2], now=100.0)
    dog.note(0, elsewhere(seconds=0.0), 100 + late)
    text = dog.look(5, [0, 2], [0, 2], now=100 + late)
    assert text.startswith("no sign of life from rank 2: in code that holds Python's lock")
