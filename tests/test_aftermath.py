"""Buttons after a failure: a press is carried out once, on each page that shows them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import ipywidgets as widgets
import pytest
from processes import wait_until

from nbddp.ui.panel import controls as module
from nbddp.ui.panel.controls import HEAL, RESTART, Aftermath

KERNEL = SimpleNamespace(
    get_parent=lambda channel: {"channel": channel},
    set_parent=lambda _identities, _parent, _channel: None,
)


class Offer:
    """Two buttons that are shown nowhere; what they begin goes on until it is let go."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = threading.Event()
        self.root = widgets.VBox([widgets.HTML("the record")])
        self.buttons = Aftermath(KERNEL, {HEAL: self._do, RESTART: self._do}, self.root)
        self.row: widgets.HBox = self.buttons._row
        self.buttons.publish()

    def _do(self) -> str:
        self.begun += 1
        assert self.may_end.wait(10)
        return "rank 1 healed\nnot carried: <gate>"

    def press(self) -> threading.Thread:
        """Press "Heal", on a thread of the kernel."""
        [button] = [each for each in self.row.children if each.description == HEAL]
        thread = threading.Thread(target=button.click)
        thread.start()
        return thread


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


def test_buttons_that_are_taken_away_while_one_is_at_work_stay_in_memory(offer: Offer) -> None:
    pressed = offer.press()
    assert wait_until(lambda: offer.begun == 1)
    offer.buttons.withdraw()
    assert offer.row.comm is not None
    offer.may_end.set()
    pressed.join(10)
    offer.press().join(10)  # the click was on its way when the buttons went
    assert offer.begun == 1
    offer.buttons.close()
    assert offer.row.comm is None


def test_a_page_that_follows_no_outputs_has_the_buttons_under_the_record(offer: Offer) -> None:
    record = offer.root.children[0]
    assert offer.root.children == (record, offer.row)
    offer.buttons.withdraw()
    assert offer.root.children == (record,)
