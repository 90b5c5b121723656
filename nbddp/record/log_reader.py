"""Read the log of a rank: show each byte once, as lines.

Live ranks send their output in messages. The output of dead ranks is read from the log file.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from nbddp.formatting import format_bytes
from nbddp.wire.torch_lines import without_torch_lines

if TYPE_CHECKING:
    from nbddp.wire.messages import Output  # a terminal reads logs without it, more quickly

MAX_LINE = 100_000  # characters shown of a line
MAX_PANEL_LINE = 4096  # characters of a line in a panel, which redraws hundreds of lines often
MAX_CURSOR_ROWS = 16  # rows that the cursor can move up, one for each nested progress bar

CHUNK_BYTES = 1 << 20
MAX_SHOWN = 4 << 20  # bytes of one span; a longer span shows only its end
SHOWN_END = 256 << 10  # bytes
FINAL_OUTPUT_BYTES = 64 << 10  # the stacks of a dozen threads take 8 kB
FINAL_OUTPUT_LINES = 10
BYTES_PER_LINE = 4096  # estimate for a tail
MAX_TAIL_BYTES = 64 << 20
FATAL = "Fatal Python error: "  # first line of faulthandler; stacks follow, innermost frame first
_THREAD = re.compile(r"(?:Current thread|Thread) 0x")
_SHELL = "IPython/core/interactiveshell.py"

_UP = re.compile(r"\x1b\[(\d{0,3})A")  # tqdm and rich move up to earlier bars
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_CUT_UP = re.compile(r"\x1b(\[\d{0,3})?\Z")
_CUT_ESCAPE = re.compile(r"\x1b(\[[0-9;:?]*)?\Z")


def log_name(rank: int) -> str:
    """Return the name of a rank's log, in the folder of its run.

    >>> log_name(3)
    'rank3.log'
    """
    return f"rank{rank}.log"


class LineAssembler:
    r"""Assembles the output of one rank into lines, in bounded memory.

    Text after a carriage return replaces its line. Rows to which the cursor moved up, such as
    the progress bars of nested loops, become lines once the cursor leaves the lowest of them.

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
        log: name of the log, for the note at the end of a cut line.
        max_line: maximum number of characters of a line.
    """

    def __init__(self, log: str = "the log", *, max_line: int = MAX_LINE) -> None:
        self._log = log
        self._max_line = max_line
        self._rows = [""]  # without a newline; after a final "\r", the next text replaces a row
        self._at = 0  # the row of the cursor
        self._cut = ""  # the start of an incomplete escape sequence

    @property
    def partial(self) -> str:
        """The text of the unfinished line; several lines for nested bars, "" for a blank line."""
        return "\n".join(self._visible(self._rows))

    def add(self, text: str) -> list[str]:
        """Add output. Return the lines that it finished."""
        text = self._cut + text
        cut = _CUT_UP.search(text)
        self._cut = cut.group() if cut else ""
        *whole, last = text.removesuffix(self._cut).split("\n")
        lines: list[str] = []
        has_moves = bool(_UP.search(text))
        for line in whole:
            is_simple = not has_moves and len(line) <= self._max_line and "\r" not in line
            if is_simple and self._rows == [""]:
                lines.append(line)  # the usual case, for possibly many lines
            else:
                self._write(line)
                lines += self._end_row()
        self._write(last)
        return lines

    def flush(self) -> list[str]:
        """Return the unfinished lines at the end of the output."""
        self._write(self._cut)
        lines = self._visible(self._rows)
        self._rows, self._at, self._cut = [""], 0, ""
        return lines

    def _visible(self, rows: Iterable[str]) -> list[str]:
        """Return rows as lines, without cleared progress bars."""
        return [
            self._format(row)
            for row in rows
            if len(row) > self._max_line or _SEQUENCE.sub("", row).strip()
        ]

    def _write(self, text: str) -> None:
        """Write text that contains no newline."""
        before, *moves = _UP.split(text)
        self._overwrite(before)
        for count, after in zip(moves[::2], moves[1::2], strict=True):
            below = len(self._rows) - 1 - self._at
            up = min(int(count or "1"), MAX_CURSOR_ROWS - below)
            if up > self._at:  # a finished row cannot be rewritten: an empty row takes its place
                self._rows[:0] = [""] * (up - self._at)
            self._at = max(0, self._at - up)
            self._overwrite(f"\r{after}")

    def _overwrite(self, text: str) -> None:
        """Add text to the cursor's row. The part after the last carriage return replaces it."""
        row = self._rows[self._at] + text
        new = row.rstrip("\r")
        self._rows[self._at] = new.rpartition("\r")[2][: self._max_line + 1] + row[len(new) :][:1]

    def _end_row(self) -> list[str]:
        """Move down one row. Return the finished rows; none while there are rows below."""
        self._at += 1
        if self._at < len(self._rows):
            self._rows[self._at] += "\r"
            return []
        lines = [*self._visible(self._rows[:-1]), self._format(self._rows[-1])]
        self._rows, self._at = [""], 0
        return lines

    def _format(self, row: str) -> str:
        text = row.rstrip("\r")
        if len(text) <= self._max_line:
            return text
        text = text[: self._max_line]
        if "\x1b" in text:  # the sequence that resets the colours is cut off
            text = _CUT_ESCAPE.sub("", text) + "\x1b[0m"
        return f"{text} … the rest of the line is in {self._log}"


@dataclass(slots=True)
class LogSpan:
    """Bytes ``start`` to ``end`` of a rank's log, which are read when they are shown.

    ``is_urgent``: the user ended the cell, so show its end without most of the output.
    """

    rank: int
    path: Path
    start: int
    end: int
    is_urgent: bool = False

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.end - self.start

    def texts(self) -> Iterator[str]:
        """Yield the text in pieces; for a very long span a notice, then only the end."""
        try:
            with self.path.open("rb") as file:
                yield from self._read(file)
        except OSError as error:
            yield f"… {format_bytes(self.size)} not shown, {self.path.name}: {error.strerror}\n"

    def _read(self, file: BinaryIO) -> Iterator[str]:
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        begin = self.start
        if self.size > (SHOWN_END if self.is_urgent else MAX_SHOWN):
            file.seek(max(0, self.start - 1))
            is_in_line = self.start > 0 and file.read(1) != b"\n"
            file.seek(self.end - SHOWN_END)
            last_line = file.readline(SHOWN_END)
            begin = file.tell()
            notice = f"… {format_bytes(begin - self.start)} not shown, all in {self.path.name}"
            # if the log goes on in that line, the next span has the end of the notice's line
            yield "\n" * is_in_line + notice + "\n" * last_line.endswith(b"\n")
        file.seek(begin)
        while data := file.read(min(CHUNK_BYTES, self.end - file.tell())):
            yield without_torch_lines(decode(data))
        if last := decode(b"", final=True):
            yield last


class LogReader:
    """Knows how much of the log of one rank was shown.

    ``begin``: the bytes that were shown; None for all that the log has.
    """

    def __init__(self, path: Path, rank: int = 0, *, begin: int | None = None) -> None:
        self._path = path
        self._rank = rank
        path.touch(0o600)
        # output of an earlier attempt, or of earlier cells
        self._shown = path.stat().st_size if begin is None else begin
        self._cell_start = self._shown

    def mark_cell_start(self) -> None:
        """Mark the start of a cell at the end of the log."""
        with suppress(OSError):
            self._cell_start = self._path.stat().st_size

    def final_output(self) -> str:
        """Return the last lines of the cell, or the report of a fatal Python error."""
        with suppress(OSError):
            text, _ = read_end(self._path, FINAL_OUTPUT_BYTES, begin=self._cell_start)
            assembler = LineAssembler()
            text = without_torch_lines(text).rstrip("\n")
            lines = [*assembler.add(text), *assembler.flush()]
            fatal = next((at for at, line in enumerate(lines) if line.startswith(FATAL)), None)
            if fatal is None:
                return "\n".join(lines[-FINAL_OUTPUT_LINES:])
            before = lines[max(0, fatal - FINAL_OUTPUT_LINES) : fatal + 1]
            return "\n".join([*filter(None, before), *_stack(lines[fatal + 1 :])])
        return ""

    def unseen_part(self, output: Output) -> LogSpan | None:
        """Return the part of a message's output that was not shown yet; None if all was shown."""
        start, end = max(output.start, self._shown), output.end
        if end <= start:
            return None
        self._shown = end
        return LogSpan(self._rank, self._path, start, end)

    def remaining(self) -> LogSpan | None:
        """Return the output that a dead rank wrote to its log but did not send.

        The stacks of threads that did not crash are omitted; the log file has them.
        """
        start = end = self._shown
        with suppress(OSError):
            self._shown = end = max(start, self._path.stat().st_size)
            text, _ = read_end(self._path, FINAL_OUTPUT_BYTES, begin=start, end=end)
            if (others := text.find("\nThread 0x")) > text.find(FATAL) >= 0:
                end -= len(text[others:].encode())
        return LogSpan(self._rank, self._path, start, end) if end > start else None


def read_end(path: Path, size: int, *, begin: int = 0, end: int | None = None) -> tuple[str, int]:
    """Return the last ``size`` bytes of a log as text, and their offset.

    Args:
        path: the log.
        size: maximum number of bytes.
        begin: offset before which nothing is read.
        end: offset of the end; None for the end of the file.

    Raises:
        OSError: the log cannot be read.
    """
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size if end is None else end
        start = max(begin, end - size)
        file.seek(start)
        return file.read(max(0, end - start)).decode(errors="replace"), start


def tail(path: Path, lines: int, *, begin: int = 0, end: int | None = None) -> str:
    """Return the last lines of a log, progress bars merged, after a note about earlier lines.

    ``begin`` and ``end`` limit the part of the log, in bytes.
    """
    text, start = read_end(path, min(lines * BYTES_PER_LINE, MAX_TAIL_BYTES), begin=begin, end=end)
    assembler = LineAssembler(path.name)
    shown = [*assembler.add(without_torch_lines(text)), *assembler.flush()]
    if start == begin and len(shown) <= lines:
        return "\n".join(shown)
    return "\n".join([f"... earlier lines in {path}", *shown[-lines:]])


def _stack(lines: Sequence[str]) -> Iterator[str]:
    """Yield the stack of the crashed thread or, if none is marked, of the thread that ran the cell.

    The stack stops at the frame in which IPython runs the cell: the frames below never differ.
    """
    starts = [at for at, line in enumerate(lines) if _THREAD.match(line)]
    stacks = [lines[at:end] for at, end in zip(starts, [*starts[1:], None], strict=False)]
    crashed = [stack for stack in stacks if stack[0].startswith("Current")]
    in_cell = [stack for stack in stacks if any(_SHELL in line for line in stack)]
    for line in (crashed or in_cell or [lines])[0]:
        if not line or _SHELL in line:
            return
        yield line
