"""The unfinished line at the end of the screen: what a rank has written and not ended yet."""

from __future__ import annotations

import math

from nbddp.record.lines import MAX_KEPT_LINE

DELAY = 0.15  # seconds after which an unfinished line is shown; most are finished before


class UnfinishedLines:
    """Decides which unfinished lines are shown, when, and how they go on.

    Only one can be at the end of the screen. When something else is shown below it, its rank's line
    is shown again in full once it is finished, and until then after twice the time of before: ranks
    that print dots at the same time do not flood the screen. A bar, which is written over by
    carriage returns, is shown once it is finished.
    """

    def __init__(self) -> None:
        self._open: int | None = None  # the rank whose line is at the end of the screen
        self._shown = ""  # what is shown of it
        self._texts: dict[int, str] = {}  # unfinished lines that are not shown, or not all of it
        self._due: dict[int, float] = {}
        self._delays: dict[int, float] = {}  # since the rank's line began
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
        """Note a rank's last output and its unfinished line. Return how the open line goes on."""
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
        """Return a rank whose line is to be shown now, the line, and what ends the open one."""
        for rank, due in self._due.items():
            if due <= now:
                del self._due[rank]
                self._delays[rank] = 2 * self._delays.get(rank, DELAY)
                end = self.leave()
                self._open, self._shown = rank, self._texts.pop(rank)
                return rank, self._shown, end
        return None

    def finish(self, rank: int, line: str) -> str | None:
        """Return what is missing of a rank's finished line at the end of the screen, if it is."""
        if rank != self._open or not line.startswith(self._shown):
            return None
        self._open = None
        return line[len(self._shown) :]

    def leave(self) -> str:
        """Return what ends the open line, below which something else is shown."""
        if self._open is None:
            return ""
        self._open = None
        return "\x1b[0m\n" if "\x1b" in self._shown else "\n"
