"""A rank's output: a file first, so that last words survive a crash; then read back and mailed.

File descriptors 1 and 2 *are* the log, so what C code and child processes write is in it too.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

from nbddp.wire.messages import Output
from nbddp.worker.output.outbox import Outbox, notify_user

CHUNK_BYTES = 64 << 10
MAX_UNREAD = 256 << 10  # bytes that are mailed; of more it is only said where they are

# what Gloo prints for every group that is formed, in one write: torch 2.9 and 2.10
_GLOO_PREFIX = "[Gloo] Rank "  # found ten times faster than the whole
_GLOO_LINES = re.compile(
    rf"^{re.escape(_GLOO_PREFIX)}\d+ is connected to \d+ peer ranks\. "
    r"Expected number of connected peer ranks is : \d+\n",
    re.MULTILINE,
)
# what torch's store client prints of a connection that ended, as it does when a wait is broken open
_STORE_PREFIX = "Exception raised from "
_STORE_TRACE = re.compile(
    r"^(?:\[rank\d+\]:)?\[W\d{4} [^\n]*\] \[c10d\] [^\n]*\n"
    rf"{_STORE_PREFIX}[^\n]*\n(?:(?:frame #|<omitting)[^\n]*\n)*\n?",
    re.MULTILINE,
)


class LogWriter:
    """The log file of one rank, written through its file descriptors and read back by offset.

    Args:
        path: the file.
        outbox: is told of each write of Python's, and once if the file can no longer be written.

    Attributes:
        print_count: how often Python has written to it in the main thread.
    """

    def __init__(self, path: Path, outbox: Outbox) -> None:
        self._outbox = outbox
        self._write_fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._read_fd = os.open(path, os.O_RDONLY)
        self._has_reported_loss = False
        self._streams: dict[int, Any] = {}  # what is printed there comes to the log
        self.print_count = 0
        self._hidden: deque[tuple[int, int]] = deque()
        self._offset = os.fstat(self._write_fd).st_size  # an earlier attempt wrote up to here

    def start_capture(self) -> None:
        """Make the file this process's standard output and error, for Python and C alike."""
        for fd in (1, 2):
            os.dup2(self._write_fd, fd)
        self.restore_python_streams()

    def restore_python_streams(self) -> None:
        """Restore descriptors 1 and 2, ``sys.stdout`` and ``sys.stderr`` after a cell."""
        for fd in (1, 2):
            if not self._is_log(fd):
                os.dup2(self._write_fd, fd)
        if sys.stdout not in self._streams.values() or _is_closed(sys.stdout):
            sys.stdout = sys.__stdout__ = self._text_stream(1)  # type: ignore[misc]
        if sys.stderr not in self._streams.values() or _is_closed(sys.stderr):
            sys.stderr = sys.__stderr__ = self._text_stream(2)  # type: ignore[misc]
        flush_python_streams()
        self._has_reported_loss = False  # each cell whose output is lost says so

    def _is_log(self, fd: int) -> bool:
        """Return whether the descriptor is open and refers to the log."""
        try:
            return os.path.sameopenfile(fd, self._write_fd)
        except OSError:
            return False

    def _text_stream(self, fd: int) -> Any:
        stream: Any = io.TextIOWrapper(
            io.BufferedWriter(_LogStream(fd, self)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,  # a line is in the file before the next statement runs
        )
        stream.mode = "w"  # as Python's own have it
        self._streams[fd] = stream
        return stream

    def on_write(self) -> None:
        """Count what the main thread prints, and have it mailed."""
        if threading.current_thread() is threading.main_thread():
            self.print_count += 1
        self._outbox.notify()

    def report_loss(self, error: OSError) -> None:
        """Say once that output is lost, and why."""
        if not self._has_reported_loss:
            self._has_reported_loss = True
            why = f"its log cannot be written: {error.strerror}"
            self._outbox.post(notify_user(f"output of this rank is lost, {why}"))

    def position(self) -> int:
        """How many bytes are in the file."""
        return os.fstat(self._read_fd).st_size

    def write_hidden(self, text: str) -> None:
        """Write it to the file alone: what is written here is not mailed."""
        flush_python_streams()
        start = self.position()
        self._hidden.append((start, sys.maxsize))  # first: the outbox may read at any moment
        try:
            os.write(self._write_fd, f"{text}\n".encode(errors="backslashreplace"))
        except OSError as error:
            self.report_loss(error)
        self._hidden[-1] = (start, self.position())

    def read(self, upto: int | None = None) -> Output | None:
        """The next piece that was written since the last call, no further than to a mark, or None.

        Of torch's own chatter the file has every line, and the piece has none. Of a flood there is
        one piece without text: whoever wants it reads the file, and what is written next is mailed
        as soon as anything else.
        """
        end = self.position() if upto is None else upto
        if self._hidden and end > self._hidden[0][0]:
            hidden_start, hidden_end = self._hidden[0]
            if self._offset >= hidden_start:
                if hidden_end == sys.maxsize:
                    return None  # not before all of it is written
                self._hidden.popleft()
                start, self._offset = self._offset, hidden_end
                return Output(start=start, end=hidden_end, text="")
            end = hidden_start
        unread = end - self._offset
        if unread > MAX_UNREAD:
            return self._skip_unread(unread)
        data = os.pread(self._read_fd, max(0, min(CHUNK_BYTES, unread)), self._offset)
        text, used = codecs.utf_8_decode(data, "replace")
        if not used:
            return None
        if _GLOO_PREFIX in text:
            text = _GLOO_LINES.sub("", text)
        if _STORE_PREFIX in text:
            text = _STORE_TRACE.sub("", text)
        start, self._offset = self._offset, self._offset + used
        return Output(start=start, end=self._offset, text=text)

    def _skip_unread(self, unread: int) -> Output:
        """Pass over what is unread, to the end of a line if there is one near, else of a letter."""
        tail = self._offset + unread - CHUNK_BYTES
        data = os.pread(self._read_fd, CHUNK_BYTES, tail)
        used = data.rfind(b"\n") + 1 or codecs.utf_8_decode(data, "replace")[1]
        start, self._offset = self._offset, tail + used
        return Output(start=start, end=self._offset, text="", is_omitted=True)


def _is_closed(stream: object) -> bool:
    try:
        return bool(getattr(stream, "closed", False))
    except ValueError:  # its buffer was detached
        return True


class _LogStream(io.RawIOBase):
    """Writes to a descriptor and says so, for a reader that need not poll then.

    A full disk loses output, and says so, but does not end a training in the middle of a print.
    """

    def __init__(self, fd: int, log: LogWriter) -> None:
        self.name = "<stdout>" if fd == 1 else "<stderr>"
        self._fd = fd
        self._log = log

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            self._log.report_loss(error)
            return len(data)
        self._log.on_write()
        return written


def flush_python_streams() -> None:
    """Flush Python's output streams, except those that a cell closed or replaced by None."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not _is_closed(stream):
            stream.flush()
