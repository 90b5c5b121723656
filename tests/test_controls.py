"""The panel's buttons: one press interrupts, two presses do what cannot be undone."""

from __future__ import annotations

import time

import pytest
from ipywidgets import Dropdown

from nbddp.lifecycle.states import GroupState
from nbddp.record.snapshot import RankSnapshot, Snapshot
from nbddp.ui.panel.controls import ASKING, Controls, Press

RUNNING = Snapshot(
    state=GroupState.RUNNING,
    ranks=(RankSnapshot(rank=0, state="running"), RankSnapshot(rank=1, state="running")),
)


class Hand:
    """Presses, and notes what was done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.done: list[tuple[Press, int]] = []
        self.controls = Controls([0, 1], lambda *it: self.done.append(it))
        self.controls.draw(RUNNING)

    def press(self, press: Press) -> None:
        self.controls.buttons[press].click()

    def asks(self) -> list[str]:
        said = [each.description for each in self.controls.buttons.values()]
        assert [each.removesuffix("?") for each in said] == [each.value for each in Press]
        return [each.removesuffix("?") for each in said if each.endswith("?")]


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    return Hand(monkeypatch)


def test_interrupt_is_done_at_once(hand: Hand) -> None:
    hand.press(Press.INTERRUPT)
    assert hand.done == [(Press.INTERRUPT, 0)]
    assert hand.controls.buttons[Press.INTERRUPT].disabled


@pytest.mark.parametrize("press", [Press.RESTART, Press.STOP, Press.KILL])
def test_what_ends_ranks_asks_first_and_is_done_by_the_second_press(
    hand: Hand, press: Press
) -> None:
    hand.press(press)
    assert hand.done == []
    assert hand.asks() == [press.value]
    assert not hand.controls.buttons[press].disabled
    hand.press(press)
    assert hand.done == [(press, 0)]
    assert hand.asks() == []
    assert hand.controls.buttons[press].disabled
    hand.controls.draw(RUNNING)
    assert not hand.controls.buttons[press].disabled


def test_a_question_that_is_not_answered_is_taken_back(hand: Hand) -> None:
    hand.press(Press.STOP)
    hand.now += ASKING
    hand.controls.draw(RUNNING)
    assert hand.asks() == ["Stop"]
    hand.now += 0.1
    hand.controls.draw(RUNNING)
    assert hand.asks() == []
    hand.press(Press.STOP)
    assert hand.done == []


def test_another_button_is_no_answer(hand: Hand) -> None:
    hand.press(Press.RESTART)
    hand.press(Press.STOP)
    assert hand.asks() == ["Stop"]
    hand.press(Press.RESTART)
    assert hand.asks() == ["Restart"]
    hand.press(Press.INTERRUPT)
    assert hand.asks() == []
    assert hand.done == [(Press.INTERRUPT, 0)]


def test_to_kill_is_asked_anew_for_another_rank(hand: Hand) -> None:
    hand.press(Press.KILL)
    [victim] = [each for each in hand.controls.row.children if isinstance(each, Dropdown)]
    victim.value = 1
    assert hand.asks() == []
    hand.press(Press.KILL)
    hand.press(Press.KILL)
    assert hand.done == [(Press.KILL, 1)]
