"""A page is told of the cells that another page has run, and of whose end it may know nothing."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbddp.magics.unseen import ABOUT, MOST, Unseen
from nbddp.magics.views import Views


class Events:
    """Those of a shell: ``begin_cell`` is what it does before it runs one."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def register(self, event: str, hear: Any) -> None:
        assert event == "pre_run_cell"
        self.heard.append(hear)


class Shell:
    """A shell, and the page whose request it works on."""

    def __init__(self) -> None:
        self.events = Events()
        self.page = "one"
        self.kernel = SimpleNamespace(
            get_parent=lambda _channel: {"header": {"session": self.page, "date": self.sent}}
        )
        self.sent: datetime | None = None
        self.said: list[str] = []
        self.unseen = Unseen(self, self.said.append)  # type: ignore[arg-type]

    def run_cell(self, page: str) -> list[str]:
        """What a page is told when it runs a cell."""
        self.page = page
        self.said.clear()
        for hear in self.events.heard:
            hear(None)
        return list(self.said)


def test_the_page_that_ran_the_cell_is_told_nothing() -> None:
    shell = Shell()
    shell.unseen.note("one", "get it", surely=False)
    assert shell.run_cell("one") == []


def test_another_page_is_told_once() -> None:
    shell = Shell()
    shell.unseen.note("one", "get it", surely=True)
    shell.unseen.note("one", "get the other", surely=False)
    shell.run_cell("one")  # the rest of "Run all", which goes to the old page
    assert shell.run_cell("two") == [
        "nbddp: the page was loaded again while a cell ran; get it; get the other",
    ]
    assert shell.run_cell("two") == []
    assert len(shell.events.heard) == 1


@pytest.mark.parametrize(("after", "is_told"), [(-60, True), (0, True), (60, False), (None, True)])
def test_a_page_that_asked_for_another_cell_after_the_end_of_one_has_seen_it(
    after: float | None, is_told: bool
) -> None:
    """Of "Run all" the page asks for all cells at once: it may be gone when the first one ends."""
    shell = Shell()
    shell.unseen.note("one", "get it", surely=False)
    shell.unseen.note("one", "get the other", surely=True)
    if after is not None:
        ended = shell.unseen._lost[0].ended
        shell.sent = datetime.fromtimestamp(ended, timezone.utc) + timedelta(seconds=after)
    shell.run_cell("one")
    [told] = shell.run_cell("two")
    assert told.split("; ")[1:] == ["get it"] * is_told + ["get the other"]


def test_what_a_magic_said_is_told_to_the_next_page() -> None:
    shell = Shell()
    views = Views(shell, Mock())  # type: ignore[arg-type]
    views._unseen, views.say = shell.unseen, shell.said.append  # type: ignore[method-assign]
    views.say_outcome("%ddp heal", "rank 1 healed")
    views.say_outcome("%ddp heal", "no rank is gone", is_said=False)
    assert shell.said == ["nbddp: rank 1 healed"]
    assert shell.run_cell("one") == []
    when = "nbddp: the page was loaded again at about the time of a cell; `%ddp heal` said: "
    assert shell.run_cell("two") == [f"{when}rank 1 healed; `%ddp heal` said: no rank is gone"]


def test_what_it_may_well_have_seen_is_not_told_of_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = Shell()
    shell.unseen.note("one", "get it", surely=False)
    shell.unseen.note("one", "get the other", surely=True)
    later = time.monotonic() + ABOUT
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert shell.run_cell("two") == [
        "nbddp: the page was loaded again while a cell ran; get the other"
    ]


def test_one_line_names_the_newest_cells_and_counts_the_others() -> None:
    shell = Shell()
    for number in range(MOST + 3):
        shell.unseen.note("one", f"get {number}", surely=True)
    when = "nbddp: the page was loaded again while a cell ran"
    assert shell.run_cell("two") == [f"{when}; get 9; get 10 (earlier cells, not listed: 6)"]


def test_the_parts_of_one_thing_are_told_of_as_one() -> None:
    shell = Shell()
    shell.unseen.note("one", "get it", surely=False)
    began = time.monotonic()
    shell.unseen.gather(began, "get nothing")
    for number in range(3):
        shell.unseen.note("one", f"get part {number}", surely=number == 1)
    shell.unseen.gather(began, "get all")
    assert shell.run_cell("two") == [
        "nbddp: the page was loaded again while a cell ran; get it; get all",
    ]


def test_a_shell_without_a_kernel_has_no_pages() -> None:
    assert Unseen(InteractiveShell(), print).page() == ""
