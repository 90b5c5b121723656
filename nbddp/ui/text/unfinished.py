"""The unfinished line at the end of the screen: output of a rank that has no newline yet."""

from __future__ import annotations

import math

from nbddp.record.log_reader import MAX_KEPT_LINE

DELAY = 0.15  # seconds after which an unfinished line is shown; most are finished before


class UnfinishedLines:
    """Decides which unfinished lines are shown, when, and which text continues them.

    Only one can be at the end of the screen. If other output is shown below it, the whole line is
    shown again once it is finished. While it is unfinished, it is shown again after a delay that
    doubles each time: ranks that print dots at the same time do not flood the screen. A progress
    bar, which overwrites itself by carriage returns, is shown only once it is finished.
    """

    def __init__(self) -> None:
        self._open: int | None = None  # the rank whose line is at the end of the screen
        self._shown = ""  # what is shown of it
        self._texts: dict[int, str] = {}  # unfinished lines that are not shown in full
        self._due: dict[int, float] = {}
        self._delays: dict[int, float] = {}  # seconds until a rank's line is shown again
        self._bars: set[int] = set()

    @property
    def next_due(self) -> float:
        """When an unfinished line is to be shown; infinite without one."""
        return min(self._due.values(), default=math.inf)

    @property
    def open(self) -> int | None:
        """The rank whose line is at the end of the screen."""
        return self._open

    def note(self, rank: int, written: str, partial: str, now: float) -> str:
        """Note a rank's output and its unfinished line. Return what to add to the open line."""
        _, has_ended, last = written.rpartition("\n")
        if has_ended:
            self.forget(rank)
        if "\r" in last:
            self._bars.add(rank)
        if not partial or rank in self._bars or len(partial) > MAX_KEPT_LINE or "\n" in partial:
            self._due.pop(rank, None)
            return ""
        if rank == self._open and partial.startswith(self._shown):
            rest, self._shown = partial[len(self._shown) :], partial
            return rest
        self._texts[rank] = partial
        self._due.setdefault(rank, now + self._delays.get(rank, DELAY))
        return ""

    def forget(self, rank: int) -> None:
        """Note that a rank's line has ended."""
        for each in (self._texts, self._due, self._delays):
            each.pop(rank, None)
        self._bars.discard(rank)

    def take_due(self, now: float) -> tuple[int, str, str] | None:
        """Return a rank whose line is due, the line, and the text that ends the open line."""
        for rank, due in self._due.items():
            if due <= now:
                del self._due[rank]
                self._delays[rank] = 2 * self._delays.get(rank, DELAY)
                end = self.leave()
                self._open, self._shown = rank, self._texts.pop(rank)
                return rank, self._shown, end
        return None

    def finish(self, rank: int, line: str) -> str | None:
        """Return the rest of a rank's finished line; None if its beginning is not the open line."""
        if rank != self._open or not line.startswith(self._shown):
            return None
        self._open = None
        return line[len(self._shown) :]

    def leave(self) -> str:
        """Leave the open line, as other output follows below it. Return the text that ends it."""
        if self._open is None:
            return ""
        self._open = None
        return "\x1b[0m\n" if "\x1b" in self._shown else "\n"
