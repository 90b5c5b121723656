"""Cells of whose end a page may have seen nothing: what they have shown is told to the next page.

A page that is loaded again takes in nothing of what it was sent before. Which page runs a cell is
known by the name of its connection, which stands in each request; and a page that asks for another
cell after the end of one has seen that end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from IPython.core.interactiveshell import InteractiveShell

ABOUT = 60.0  # seconds after a cell in which a new page, most likely, was loaded while that ran
MOST = 8  # cells that one page is told of
NAMED = 2  # of these cells, the newest ones whose records the line names
DRAWN = 1.0  # seconds after a cell in which a page has drawn its end


class Lost(NamedTuple):
    """A cell; ``page`` ran it, ``text`` says how its record is got.

    ``at`` is in ``time.monotonic()``, ``ended`` the same in ``time.time()``.
    """

    page: str
    text: str
    surely: bool
    at: float
    ended: float


class Unseen:
    """One for each shell; ``say`` tells the user something."""

    def __init__(self, shell: InteractiveShell, say: Callable[[str], None]) -> None:
        self._shell = shell
        self._say = say
        self._lost: deque[Lost] = deque(maxlen=MOST)
        self._is_listening = False

    def page(self) -> str:
        """The page that runs the present cell."""
        return str(self._header().get("session", ""))

    def _header(self) -> dict[str, Any]:
        kernel = getattr(self._shell, "kernel", None)
        return kernel.get_parent("shell").get("header", {}) if kernel is not None else {}

    def note(self, page: str, text: str, *, surely: bool) -> None:
        """A cell is over; ``surely`` if a page was loaded meanwhile, or has not seen the end."""
        self._lost.append(Lost(page, text, surely, time.monotonic(), time.time()))
        if not self._is_listening:
            self._shell.events.register("pre_run_cell", self._tell)
            self._is_listening = True

    def _tell(self, *_info: object) -> None:
        page, now = self.page(), time.monotonic()
        recent = [each for each in self._lost if each.surely or now - each.at < ABOUT]
        if others := [each for each in recent if each.page != page]:
            self._say(_line(others))
        date = self._header().get("date")
        sent = date.timestamp() if isinstance(date, datetime) else 0.0
        own = (each for each in recent if each.page == page)
        self._lost = deque(
            (each for each in own if each.surely or sent < each.ended + DRAWN), maxlen=MOST
        )


def _line(lost: Sequence[Lost]) -> str:
    """Tell of all cells in one line: after "Run All" they may be many."""
    when = (
        "while a cell ran" if any(each.surely for each in lost) else "at about the time of a cell"
    )
    texts = "; ".join(each.text for each in lost[-NAMED:])
    more = f" (earlier cells, not listed: {len(lost) - NAMED})" if len(lost) > NAMED else ""
    return f"nbddp: the page was loaded again {when}; {texts}{more}"
