"""From pieces of output to lines, with carriage returns folded as a terminal would."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_LINE = 100_000  # characters that are shown of a line
MAX_KEPT_LINE = 4096  # of one that stays in a panel, where hundreds are drawn again and again

MAX_HELD = 16  # rows that the cursor may go up: a bar for each of so many nested loops

_CUT_ESCAPE = re.compile(r"\x1b(\[[0-9;:?]*)?\Z")
_UP = re.compile(r"\x1b\[(\d{0,3})A")  # as tqdm and rich go back to the bars above
_CUT_UP = re.compile(r"\x1b(\[\d{0,3})?\Z")
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def log_name(rank: int) -> str:
    """The file of a rank's output, in the folder of its run.

    >>> log_name(3)
    'rank3.log'
    """
    return f"rank{rank}.log"


class LineAssembler:
    r"""Puts one rank's lines together, in a memory that does not grow with them.

    Rows that the cursor has come back to, as bars of nested loops do, are lines when others come
    below them, and until then are written over.

    >>> lines = LineAssembler()
    >>> lines.add("ready\nstep 1\rstep 2\rstep 3")
    ['ready']
    >>> lines.add(" of 9\n"), lines.flush()
    (['step 3 of 9'], [])
    >>> lines.add("outer 1\ninner 1\x1b[A\ninner 2\x1b[A\router 2")
    ['outer 1']
    >>> lines.flush()
    ['outer 2', 'inner 2']

    Args:
        log: where the whole of a line stands of which only the beginning is shown.
        max_line: how many characters of a line are shown.
    """

    def __init__(self, log: str = "the log", *, max_line: int = MAX_LINE) -> None:
        self._log = log
        self._max_line = max_line
        self._above: list[_Row] = []
        self._row = self._new_row()
        self._below: list[_Row] = []  # the nearest is the last
        self._held = ""  # what may be the beginning of a sequence

    @property
    def partial(self) -> str:
        """The line that is being written, as it looks now; several where bars are nested."""
        if not self._above and not self._below:
            return self._row.text
        return "\n".join([*_said([*self._above, self._row]), *self._said_below()])

    def add(self, text: str) -> list[str]:
        """The lines that are complete now."""
        text = self._without_cut(text)
        first, *others = text.split("\n")
        self._write(first)
        if not others:
            return []
        lines = self._end_row()
        *whole, last = others
        is_log = not (self._above or self._below or _goes_up(text))
        for line in whole:
            if is_log and len(line) <= self._max_line and "\r" not in line:
                lines.append(line)  # most are, and there may be many
            else:
                self._write(line)
                lines += self._end_row()
        self._write(last)
        return lines

    def flush(self) -> list[str]:
        """What is left, as lines, when no more will come."""
        self._write(self._held)
        is_there = self._row.length > 0
        lines = [*_said(self._above), *([self._row.text] if is_there else []), *self._said_below()]
        self._above, self._row, self._below, self._held = [], self._new_row(), [], ""
        return lines

    def _without_cut(self, text: str) -> str:
        """What can be read now; the beginning of a sequence waits for the rest."""
        text = self._held + text
        cut = _CUT_UP.search(text)
        self._held = cut.group() if cut else ""
        return text[: cut.start()] if cut else text

    def _write(self, text: str) -> None:
        first, *others = _UP.split(text)
        self._row.write(first)
        for count, piece in zip(others[::2], others[1::2], strict=True):
            self._go_up(int(count or "1"))
            self._row.write(piece)

    def _go_up(self, count: int) -> None:
        for _ in range(count):
            if len(self._below) == MAX_HELD:
                return
            self._below.append(self._row)
            # what stood there may have been told already: then it is an empty row
            self._row = self._above.pop() if self._above else self._new_row()
            self._row.go_back()

    def _end_row(self) -> list[str]:
        """Go down; the rows above are lines when there is none below that can be written over."""
        if self._below:
            self._above.append(self._row)
            below = self._below.pop()
            self._row = below if below.text.strip() else self._new_row()
            self._row.go_back()
            return []
        lines = [*_said(self._above), self._row.text]
        self._above, self._row = [], self._new_row()
        return lines

    def _said_below(self) -> list[str]:
        return _said(reversed(self._below))

    def _new_row(self) -> _Row:
        return _Row(self._log, self._max_line)


def _goes_up(text: str) -> bool:
    return "\x1b" in text and _UP.search(text) is not None


def _said(rows: Iterable[_Row]) -> list[str]:
    """What stands in rows; a bar that was wiped is blanks."""
    return [text for text in (row.text for row in rows) if text.strip()]


class _Row:
    """A line that is being written, and written over after carriage returns."""

    def __init__(self, log: str, max_line: int) -> None:
        self._log = log
        self._max_line = max_line
        self._before = _Written(max_line)  # what stood there when the last carriage return came
        self._now = _Written(max_line)  # what was written over it since

    @property
    def length(self) -> int:
        """How many characters were written, more or less."""
        return self._now.length or self._before.length

    @property
    def text(self) -> str:
        """What a terminal shows of it."""
        return self._say(*self._folded())

    def write(self, text: str) -> None:
        """Take more of it."""
        first, *others = text.split("\r")
        self._now.add(first)
        for other in others:
            self.go_back()
            self._now.add(other)

    def go_back(self) -> None:
        """What comes is written over what is there, from the left."""
        if self._now.length:
            folded, length = self._folded()
            self._before.clear()
            self._before.add(folded)
            self._before.length = length
            self._now.clear()

    def _folded(self) -> tuple[str, int]:
        """What a terminal shows of a line that was written over: each piece from the left."""
        now, before = self._now, self._before
        if now.is_whole or not before.length:
            return now.text, now.length
        text, length = before.text, before.length
        if before.is_whole:  # no sequence is cut in two: what is left of it has no colours
            text = _SEQUENCE.sub("", text)
            length -= len(before.text) - len(text)
        shown = now.text + text[now.length :]
        return shown[: self._max_line], max(now.length, length)

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
