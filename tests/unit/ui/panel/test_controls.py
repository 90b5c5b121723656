"""The buttons: what cannot be undone asks first, and after a failure each is carried out once."""

import threading
from collections.abc import Iterator
from unittest.mock import Mock

import ipywidgets as widgets
import pytest
from ipywidgets import Dropdown
from processes import wait_until

from nbddp.lifecycle.group_state import GroupState
from nbddp.record.snapshot import RankSnapshot, Snapshot
from nbddp.ui.panel import controls
from nbddp.ui.panel.controls import ButtonPress, Controls

RUNNING = Snapshot(
    state=GroupState.RUNNING,
    ranks=tuple(RankSnapshot(rank=rank, state="running") for rank in range(2)),
)


class Hand:
    def __init__(self) -> None:
        self.done: list[tuple[ButtonPress, int]] = []
        self.controls = Controls([0, 1], lambda *it: self.done.append(it))
        self.controls.draw(RUNNING)

    def press(self, press: ButtonPress) -> None:
        self.controls.buttons[press].click()

    def asks(self) -> list[str]:
        labels = [each.description for each in self.controls.buttons.values()]
        assert [each.removesuffix("?") for each in labels] == [each.value for each in ButtonPress]
        return [each.removesuffix("?") for each in labels if each.endswith("?")]


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.mark.parametrize("press", [ButtonPress.RESTART, ButtonPress.STOP, ButtonPress.KILL])
def test_buttons_that_end_ranks_act_on_the_second_press(
    hand: Hand, press: ButtonPress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controls, "DOUBLE_CLICK_SECONDS", 0.0)
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


def test_a_double_click_does_not_confirm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "DOUBLE_CLICK_SECONDS", 1000.0)
    hand, restarts = Hand(), Mock(return_value="restarted")
    retry = controls.RetryButtons(Mock(), {controls.RESTART: restarts})
    monkeypatch.setattr(controls, "publish", lambda *_args, **_more: None)
    retry.publish()
    restart = retry._row.children[0]
    for _ in range(2):
        hand.press(ButtonPress.KILL)
        restart.click()
    assert (hand.done, hand.asks()) == ([], ["Kill"])
    assert (restarts.call_count, restart.description) == (0, "Restart?")
    monkeypatch.setattr(controls, "DOUBLE_CLICK_SECONDS", 0.0)
    hand.press(ButtonPress.KILL)
    restart.click()
    assert hand.done == [(ButtonPress.KILL, 0)]
    assert (restarts.call_count, restart.description) == (1, "Restart")


def test_an_unanswered_confirmation_is_withdrawn(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand.press(ButtonPress.STOP)
    hand.controls.draw(RUNNING)
    assert hand.asks() == ["Stop"]
    monkeypatch.setattr(controls, "CONFIRM_SECONDS", 0.0)
    hand.controls.draw(RUNNING)
    assert hand.asks() == []
    hand.press(ButtonPress.STOP)
    assert hand.done == []


def test_another_button_or_rank_does_not_confirm_and_interrupt_acts_at_once(hand: Hand) -> None:
    for press in (ButtonPress.RESTART, ButtonPress.STOP, ButtonPress.KILL):
        hand.press(press)
        assert hand.asks() == [press.value]
    [victim] = [each for each in hand.controls.row.children if isinstance(each, Dropdown)]
    victim.value = 1
    assert hand.asks() == []
    hand.press(ButtonPress.KILL)
    hand.press(ButtonPress.INTERRUPT)
    assert hand.asks() == []
    assert hand.done == [(ButtonPress.INTERRUPT, 1)]
    assert hand.controls.buttons[ButtonPress.INTERRUPT].disabled


class Offer:
    """Two buttons that are shown nowhere; what they begin goes on until it is let go."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = threading.Event()
        self.root = widgets.VBox([widgets.HTML("the record")])
        actions = {controls.HEAL: self._do, controls.RESTART: self._do}
        self.buttons = controls.RetryButtons(Mock(), actions, self.root)
        self.row: widgets.HBox = self.buttons._row
        self.buttons.publish()

    def _do(self) -> str:
        self.begun += 1
        assert self.may_end.wait(10)
        return "rank 1 healed\nnot carried: <gate>"

    def press(self) -> threading.Thread:
        """Press "Heal", on a thread of the kernel."""
        [button] = [each for each in self.row.children if each.description == controls.HEAL]
        thread = threading.Thread(target=button.click)
        thread.start()
        return thread


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Offer]:
    monkeypatch.setattr(controls, "publish", lambda *_args, **_more: None)
    offer = Offer()
    yield offer
    offer.may_end.set()


def test_two_quick_presses_heal_once_and_show_the_result(offer: Offer) -> None:
    first = offer.press()
    assert wait_until(lambda: offer.begun == 1)
    offer.press().join(10)
    offer.may_end.set()
    first.join(10)
    assert offer.begun == 1
    assert "rank 1 healed<br>not carried: &lt;gate&gt;" in offer.row.children[-1].value


def test_only_the_heal_button_is_hidden_after_a_heal(offer: Offer) -> None:
    heal, restart, _ = offer.row.children
    offer.buttons.hide_heal()
    assert (heal.layout.display, restart.layout.display) == ("none", None)
    controls.RetryButtons(Mock(), {controls.RESTART: str}).hide_heal()


def test_buttons_removed_during_an_action_are_closed_only_after_it(offer: Offer) -> None:
    record = offer.root.children[0]
    pressed = offer.press()
    assert wait_until(lambda: offer.begun == 1)
    assert offer.root.children == (record, offer.row), "for a page without updates of its outputs"
    offer.buttons.remove()
    assert offer.root.children == (record,)
    assert offer.row.comm is not None
    offer.may_end.set()
    pressed.join(10)
    offer.press().join(10)  # the click was on its way when the buttons went
    assert offer.begun == 1
    parts = offer.row.children
    offer.buttons.close()
    assert not any(each.comm for each in (offer.row, *parts))
