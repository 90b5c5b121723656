"""From pieces of output to lines, with carriage returns folded as a terminal would."""

from __future__ import annotations

MAX_LINE = 4096  # characters; a longer line without an end is cut into several


class LineAssembler:
    r"""Puts one rank's lines together.

    >>> lines = LineAssembler()
    >>> lines.add("ready\nstep 1\rstep 2\rstep 3")
    ['ready']
    >>> lines.add(" of 9\n"), lines.flush()
    (['step 3 of 9'], [])
    """

    def __init__(self) -> None:
        self._partial = ""

    @property
    def partial(self) -> str:
        """The line that is being written, as it looks now."""
        return _fold(self._partial)

    def add(self, text: str) -> list[str]:
        """The lines that are complete now."""
        *complete, self._partial = (self._partial + text).split("\n")
        lines = [piece for line in complete for piece in _pieces(_fold(line))]
        if len(self._partial) > MAX_LINE:
            self._partial = _compact(self._partial)
        if len(self._partial) > 2 * MAX_LINE or len(_fold(self._partial)) > MAX_LINE:
            *pieces, self._partial = _pieces(_fold(self._partial))
            lines += pieces
        return lines

    def flush(self) -> list[str]:
        """What is left, as a line, when no more will come."""
        partial, self._partial = self._partial, ""
        return _pieces(_fold(partial)) if partial.strip("\r") else []


def _fold(line: str) -> str:
    """What a terminal shows of a line that was written over: each piece from the left."""
    if "\r" not in line:
        return line
    shown = ""
    for piece in line.rstrip("\r").split("\r"):
        is_whole = "\x1b" in piece  # a bar in colours, or one that wipes the line: all of it is new
        shown = piece if is_whole else piece + shown[len(piece) :]
    return shown


def _compact(line: str) -> str:
    """Fold all but what is being written now, which a next piece goes on with."""
    before, mark, now = line.rpartition("\r")
    return _fold(before) + mark + now


def _pieces(line: str) -> list[str]:
    if len(line) <= MAX_LINE:
        return [line]
    return [line[at : at + MAX_LINE] for at in range(0, len(line), MAX_LINE)]
