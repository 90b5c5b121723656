"""Every byte of a rank's log reaches the cell once: by mail while it lives, from the file after."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from nbddp.wire.messages import Output

CHUNK_BYTES = 1 << 20
LAST_BYTES = 8192
LAST_LINES = 10
FATAL = "Fatal Python error: "  # what faulthandler begins with; the stack follows, innermost first


class LogReader:
    """Knows how far the log of one rank has been shown."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch(0o600)
        self._shown = path.stat().st_size  # an earlier attempt's output
        self._cell_began = self._shown

    def begin_cell(self) -> None:
        """What comes from here on belongs to a new cell."""
        with suppress(FileNotFoundError):
            self._cell_began = self._path.stat().st_size

    def last_words(self) -> str:
        """The last lines of the cell; from a fatal error on, if Python told of one."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(max(self._cell_began, self._path.stat().st_size - LAST_BYTES))
            return _last_words(file.read().decode(errors="replace"))
        return ""

    def accept(self, output: Output) -> str:
        """The text of a mailed piece, or nothing if the file was read beyond it already."""
        if output.start < self._shown:
            return ""
        self._shown = output.end
        return output.text

    def rest(self) -> Iterator[str]:
        """What a rank that is gone wrote and could not mail any more."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._shown)
            while data := file.read(CHUNK_BYTES):
                self._shown += len(data)
                yield decode(data)
        if last := decode(b"", final=True):
            yield last


def _last_words(text: str) -> str:
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip("\n").split("\n")]
    fatal = next((at for at, line in enumerate(lines) if line.startswith(FATAL)), None)
    if fatal is None:
        return "\n".join(lines[-LAST_LINES:])
    return "\n".join([*lines[max(0, fatal - LAST_LINES) : fatal], *_without_shell(lines[fatal:])])


def _without_shell(stack: Sequence[str]) -> Iterator[str]:
    """A stack up to where IPython runs the cell: below that it is the same every time."""
    for line in stack:
        if "IPython/core/interactiveshell.py" in line:
            return
        if line:
            yield line
