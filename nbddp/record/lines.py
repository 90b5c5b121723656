"""From pieces of output to lines, with carriage returns folded as a terminal would."""

from __future__ import annotations

import re

MAX_LINE = 100_000  # characters that are shown of a line
MAX_KEPT_LINE = 4096  # of one that stays in a panel, where hundreds are drawn again and again

_CUT_ESCAPE = re.compile(r"\x1b(\[[0-9;:?]*)?\Z")


def log_name(rank: int) -> str:
    """The file of a rank's output, in the folder of its run.

    >>> log_name(3)
    'rank3.log'
    """
    return f"rank{rank}.log"


class LineAssembler:
    r"""Puts one rank's lines together, in a memory that does not grow with them.

    >>> lines = LineAssembler()
    >>> lines.add("ready\nstep 1\rstep 2\rstep 3")
    ['ready']
    >>> lines.add(" of 9\n"), lines.flush()
    (['step 3 of 9'], [])

    Args:
        log: where the whole of a line stands of which only the beginning is shown.
        max_line: how many characters of a line are shown.
    """

    def __init__(self, log: str = "the log", *, max_line: int = MAX_LINE) -> None:
        self._log = log
        self._before = _Written(max_line)  # what stood there when the last carriage return came
        self._now = _Written(max_line)  # what was written over it since
        self._max_line = max_line

    @property
    def partial(self) -> str:
        """The line that is being written, as it looks now."""
        return self._say(*self._folded())

    def add(self, text: str) -> list[str]:
        """The lines that are complete now."""
        first, *others = text.split("\n")
        self._write(first)
        if not others:
            return []
        lines = [self._end()]
        *whole, last = others
        for line in whole:
            if len(line) <= self._max_line and "\r" not in line:
                lines.append(line)  # most are, and there may be many
            else:
                self._write(line)
                lines.append(self._end())
        self._write(last)
        return lines

    def flush(self) -> list[str]:
        """What is left, as a line, when no more will come."""
        is_there = bool(self._now.length or self._before.length)
        line = self._end()
        return [line] if is_there else []

    def _write(self, text: str) -> None:
        first, *others = text.split("\r")
        self._now.add(first)
        for other in others:
            self._return()
            self._now.add(other)

    def _return(self) -> None:
        if self._now.length:
            folded, length = self._folded()
            self._before.clear()
            self._before.add(folded)
            self._before.length = length
            self._now.clear()

    def _end(self) -> str:
        line = self.partial
        self._before.clear()
        self._now.clear()
        return line

    def _folded(self) -> tuple[str, int]:
        """What a terminal shows of a line that was written over: each piece from the left."""
        now, before = self._now, self._before
        if now.is_whole or not before.length:
            return now.text, now.length
        shown = now.text + before.text[now.length :]
        return shown[: self._max_line], max(now.length, before.length)

    def _say(self, text: str, length: int) -> str:
        left = length - len(text)
        if not left:
            return text
        if "\x1b" in text:  # what would have ended the colours is not there
            text = _CUT_ESCAPE.sub("", text) + "\x1b[0m"
        return f"{text} … {left:,} more characters in {self._log}"


class _Written:
    """Characters from the left, of which the first are kept and all are counted."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self.clear()

    def clear(self) -> None:
        self._pieces: list[str] = []
        self._kept = 0
        self.length = 0
        self.is_whole = False  # a bar in colours, or one that wipes the line: all of it is new

    def add(self, text: str) -> None:
        if not text:
            return
        self.length += len(text)
        self.is_whole = self.is_whole or "\x1b" in text
        if self._kept < self._max_kept:
            piece = text[: self._max_kept - self._kept]
            self._pieces.append(piece)
            self._kept += len(piece)

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""
