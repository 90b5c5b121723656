"""A page is told of the cells that another page has run, and of whose end it may know nothing."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from IPython.core.interactiveshell import InteractiveShell
from syrupy.assertion import SnapshotAssertion

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


@pytest.fixture
def shell() -> Shell:
    """A shell whose first page has run a cell whose end it may have seen, and one it has not."""
    shell = Shell()
    shell.unseen.note("one", "get it", surely=False)
    shell.unseen.note("one", "get the other", surely=True)
    return shell


def test_another_page_is_told_once_and_the_page_that_ran_the_cell_never(
    shell: Shell, snapshot: SnapshotAssertion
) -> None:
    assert shell.run_cell("one") == []  # the rest of "Run all", which goes to the old page
    assert shell.run_cell("two") == snapshot
    assert shell.run_cell("two") == []
    assert len(shell.events.heard) == 1


@pytest.mark.parametrize(("after", "is_told"), [(-60, True), (0, True), (60, False), (None, True)])
def test_a_page_that_asked_for_another_cell_after_the_end_of_one_has_seen_it(
    shell: Shell, after: float | None, is_told: bool
) -> None:
    """Of "Run all" the page asks for all cells at once: it may be gone when the first one ends."""
    if after is not None:
        ended = shell.unseen._lost[0].ended
        shell.sent = datetime.fromtimestamp(ended, timezone.utc) + timedelta(seconds=after)
    shell.run_cell("one")
    [told] = shell.run_cell("two")
    assert told.split("; ")[1:] == ["get it"] * is_told + ["get the other"]


def test_what_a_magic_said_is_told_to_the_next_page(snapshot: SnapshotAssertion) -> None:
    shell = Shell()
    views = Views(shell, Mock())  # type: ignore[arg-type]
    views._unseen, views.say = shell.unseen, shell.said.append  # type: ignore[method-assign]
    views.say_outcome("%ddp heal", "one")
    views.say_outcome("%ddp heal", "two", is_said=False)
    assert shell.said == ["nbddp: one"]
    assert shell.run_cell("one") == []
    assert shell.run_cell("two") == snapshot


def test_what_it_may_well_have_seen_is_not_told_of_for_long(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = time.monotonic() + ABOUT
    monkeypatch.setattr(time, "monotonic", lambda: later)
    [told] = shell.run_cell("two")
    assert told.split("; ")[1:] == ["get the other"]


def test_one_line_names_the_newest_cells_and_counts_the_others(snapshot: SnapshotAssertion) -> None:
    shell = Shell()
    for number in range(MOST + 3):
        shell.unseen.note("one", f"get {number}", surely=True)
    assert shell.run_cell("two") == snapshot


def test_a_shell_without_a_kernel_has_no_pages() -> None:
    assert Unseen(InteractiveShell(), print).page() == ""
