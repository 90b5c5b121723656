"""Buttons after a failure: what they do is done once, and they stay in memory until it is done."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import ipywidgets as widgets
import pytest
from processes import wait_until

from nbddp.ui.panel import aftermath as module
from nbddp.ui.panel.aftermath import RESTART, RUN_AGAIN, Aftermath

KERNEL = SimpleNamespace(
    get_parent=lambda channel: {"channel": channel},
    set_parent=lambda _identities, _parent, _channel: None,
)


class Offer:
    """Two buttons that are shown nowhere; what they begin goes on until it is let go."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = threading.Event()
        self.buttons = Aftermath(KERNEL, {RESTART: self._do, RUN_AGAIN: self._do})
        self.row: widgets.HBox = self.buttons._row
        self.buttons.publish()

    def _do(self) -> str:
        self.begun += 1
        assert self.may_end.wait(10)
        return "rank 1 healed\nnot carried: <gate>"

    def press(self) -> threading.Thread:
        """Press "Restart and run again", on a thread of the kernel."""
        [button] = [each for each in self.row.children if each.description == RUN_AGAIN]
        thread = threading.Thread(target=button.click)
        thread.start()
        return thread

    def is_closed(self) -> bool:
        return self.row.comm is None


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Offer]:
    monkeypatch.setattr(module, "publish_display_data", lambda *_args, **_more: None)
    offer = Offer()
    yield offer
    offer.may_end.set()


def test_two_quick_presses_do_it_once_and_say_what_was_done(offer: Offer) -> None:
    first = offer.press()
    assert wait_until(lambda: offer.begun == 1)
    offer.press().join(10)
    offer.may_end.set()
    first.join(10)
    assert offer.begun == 1
    assert "rank 1 healed<br>not carried: &lt;gate&gt;" in offer.row.children[-1].value


def test_buttons_that_are_taken_away_meanwhile_are_closed_when_all_is_done(offer: Offer) -> None:
    pressed = offer.press()
    assert wait_until(lambda: offer.begun == 1)
    offer.buttons.withdraw()
    assert not offer.is_closed()
    offer.may_end.set()
    pressed.join(10)
    assert offer.is_closed()
    offer.press().join(10)  # it was on its way when the buttons went
    assert offer.begun == 1


def test_buttons_that_nobody_pressed_are_closed_at_once(offer: Offer) -> None:
    offer.buttons.withdraw()
    assert offer.is_closed()
