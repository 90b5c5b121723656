"""Buttons after a failure: what they do is done once, and they stay in memory until it is done."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from processes import wait_until

from nbddp.ui.panel import aftermath as module
from nbddp.ui.panel.aftermath import RESTART, RUN_AGAIN, Aftermath


class Kernel:
    """As much of a kernel as the buttons ask for."""

    def get_parent(self, channel: str) -> dict[str, Any]:
        return {"channel": channel}

    def set_parent(self, identities: list[bytes], parent: dict[str, Any], channel: str) -> None:
        pass


class Deed:
    """Goes on until it is let go."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = threading.Event()

    def __call__(self) -> str:
        self.begun += 1
        assert self.may_end.wait(10)
        return "done"


@pytest.fixture
def deed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deed]:
    """What a button begins; nothing is shown anywhere."""
    monkeypatch.setattr(module, "publish_display_data", lambda *_args, **_more: None)
    deed = Deed()
    yield deed
    deed.may_end.set()


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was closed."""
    closed: list[object] = []
    monkeypatch.setattr(module, "close", closed.append)
    return closed


def press(offer: Aftermath) -> threading.Thread:
    """Press "Restart and run again", on a thread of the kernel."""
    thread = threading.Thread(target=offer._buttons[RUN_AGAIN].click)
    thread.start()
    return thread


def test_two_quick_presses_do_it_once_whichever_threads_answer_them(deed: Deed) -> None:
    offer = Aftermath(Kernel(), {RESTART: deed, RUN_AGAIN: deed})
    offer.publish()
    first = press(offer)
    assert wait_until(lambda: deed.begun == 1)
    press(offer).join(10)
    deed.may_end.set()
    first.join(10)
    assert deed.begun == 1


def test_buttons_that_are_taken_away_meanwhile_are_closed_when_all_is_done(
    deed: Deed, closed: list[object]
) -> None:
    offer = Aftermath(Kernel(), {RESTART: deed, RUN_AGAIN: deed})
    offer.publish()
    pressed = press(offer)
    assert wait_until(lambda: deed.begun == 1)
    offer.withdraw()
    assert closed == []
    deed.may_end.set()
    pressed.join(10)
    assert closed == [offer._row]
    press(offer).join(10)  # it was on its way when the buttons went
    assert deed.begun == 1


def test_buttons_that_nobody_pressed_are_closed_at_once(deed: Deed, closed: list[object]) -> None:
    offer = Aftermath(Kernel(), {RESTART: deed, RUN_AGAIN: deed})
    offer.publish()
    offer.withdraw()
    assert closed == [offer._row]


def test_what_a_button_did_is_said_in_its_lines() -> None:
    offer = Aftermath(Kernel(), {RESTART: lambda: ""})
    offer._say("rank 1 healed\nnot carried: <gate>")
    assert "rank 1 healed<br>not carried: &lt;gate&gt;" in offer._said.value
