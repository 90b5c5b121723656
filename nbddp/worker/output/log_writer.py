"""Write a rank's output to its log file, then read it back and send it.

Output in a file survives a crash. File descriptors 1 and 2 refer to the log file, so it also has
the output of C code and child processes.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

from nbddp.private_files import open_private_file
from nbddp.wire.messages import Output
from nbddp.wire.torch_lines import part_of_trace, without_torch_lines
from nbddp.worker.output.outbox import Outbox, build_notice

CHUNK_BYTES = 64 << 10
MAX_UNREAD = 256 << 10  # bytes to send at once; of longer output, only the position is sent
MAX_UNWRITTEN = 1000  # pieces of output that wait to be sent while the file cannot be written


class LogWriter:
    """The log file of one rank, written through its file descriptors and read back by offset.

    Args:
        path: the log file.
        outbox: is notified of each write by Python, and sends a notice if a write fails.

    Attributes:
        print_count: how often Python code in the main thread has written to the log.
    """

    def __init__(self, path: Path, outbox: Outbox) -> None:
        self._outbox = outbox
        self._write_fd = open_private_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._read_fd = open_private_file(path, os.O_RDONLY)
        self._has_reported_loss = False
        self._streams: dict[int, Any] = {}  # by file descriptor
        self.print_count = 0
        self._hidden: deque[tuple[int, int]] = deque()
        self._hidden_in_cell: list[tuple[int, int]] = []
        self._unwritten: deque[bytes] = deque(maxlen=MAX_UNWRITTEN)
        # the end of an earlier attempt's output
        self._offset = self._cell_start = os.fstat(self._write_fd).st_size

    def capture_output(self) -> None:
        """Make the log file the standard output and error of this process, for Python and C.

        Call this at the start, and after each cell, which may have replaced them.
        """
        for fd, name in ((1, "stdout"), (2, "stderr")):
            if not self._is_log(fd):
                os.dup2(self._write_fd, fd)
            stream = getattr(sys, name)
            if stream not in self._streams.values() or _is_closed(stream):
                vars(sys)[name] = vars(sys)[f"__{name}__"] = self._text_stream(fd)
        flush_python_streams()

    def begin_cell(self) -> None:
        """Start a cell: a loss of output is reported once in each cell, its traceback included."""
        self._has_reported_loss = False
        self._cell_start, self._hidden_in_cell = self.position(), []

    def _is_log(self, fd: int) -> bool:
        """Return whether the descriptor is open and refers to the log."""
        try:
            return os.path.sameopenfile(fd, self._write_fd)
        except OSError:
            return False

    def _text_stream(self, fd: int) -> Any:
        # as in Python: the variable's error handler is for standard output only
        handler = os.environ.get("PYTHONIOENCODING", "").partition(":")[2] if fd == 1 else ""
        stream: Any = io.TextIOWrapper(
            io.BufferedWriter(_LogStream(fd, self)),
            encoding="utf-8",
            errors=handler or "backslashreplace",
            line_buffering=True,  # a line is in the file before the next statement runs
        )
        stream.mode = "w"  # as in Python's own streams
        self._streams[fd] = stream
        return stream

    def on_write(self) -> None:
        """Count a write in the main thread, and notify the outbox."""
        if threading.current_thread() is threading.main_thread():
            self.print_count += 1
        self._outbox.notify()

    def report_loss(self, error: OSError, data: bytes = b"") -> None:
        """Notify the user once that the file lacks output. Show it if Python has written it."""
        if not self._has_reported_loss:
            self._has_reported_loss = True
            why = f"its log file cannot be written: {error.strerror}"
            text = "output of this rank is not kept, and that of C code and child processes is lost"
            self._outbox.post(build_notice(f"{text}, because {why}"))
        if data:
            self._unwritten.append(data[-CHUNK_BYTES:])
            self._outbox.notify()

    def position(self) -> int:
        """Return the size of the log file in bytes."""
        return os.fstat(self._read_fd).st_size

    def write_hidden(self, text: str) -> None:
        """Write text to the log file without sending it."""
        flush_python_streams()
        start = self.position()
        self._hidden.append((start, sys.maxsize))  # first: the outbox may read at any moment
        try:
            os.write(self._write_fd, f"{text}\n".encode(errors="backslashreplace"))
        except OSError as error:
            self.report_loss(error)
        self._hidden[-1] = (start, self.position())
        self._hidden_in_cell.append(self._hidden[-1])

    def rewind(self) -> None:
        """Send the output of the cell again."""
        # On the nbddp-outbox thread.
        self._offset, self._hidden = self._cell_start, deque(self._hidden_in_cell)

    def read(self, upto: int | None = None) -> Output | None:
        """Return the next unread output, up to a position. Return None if there is none.

        The file has all messages of torch, but the returned output leaves some out. Of very long
        output, only the position in the file is returned, so that later output is not delayed.
        """
        # On the nbddp-outbox thread.
        end = self.position() if upto is None else upto
        if self._hidden and end > self._hidden[0][0]:
            hidden_start, hidden_end = self._hidden[0]
            if self._offset >= hidden_start:
                if hidden_end == sys.maxsize:
                    return None  # the hidden text is not complete yet
                self._hidden.popleft()
                start, self._offset = self._offset, hidden_end
                return Output(start=start, end=hidden_end, text="")
            end = hidden_start
        unread = end - self._offset
        if unread > MAX_UNREAD:
            return self._skip_unread(unread)
        data = os.pread(self._read_fd, max(0, min(CHUNK_BYTES, unread)), self._offset)
        data = data[: len(data) - part_of_trace(data)]  # the rest comes at once
        text, used = codecs.utf_8_decode(data, "replace")
        if not used:
            return self._take_unwritten()
        start, self._offset = self._offset, self._offset + used
        return Output(start=start, end=self._offset, text=without_torch_lines(text))

    def _take_unwritten(self) -> Output | None:
        if not self._unwritten:
            return None
        text = self._unwritten.popleft().decode(errors="replace")
        return Output(start=self._offset, end=self._offset, text=text)

    def _skip_unread(self, unread: int) -> Output:
        """Skip unread output, to the end of a line if possible, else of a character."""
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
    """Write to a file descriptor and notify the log, so that its reader need not poll.

    If the disk is full, output is only shown and the user is notified, but ``print`` does not fail.
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
            self._log.report_loss(error, bytes(data))
            return len(data)
        self._log.on_write()
        return written


def flush_python_streams() -> None:
    """Flush Python's output streams, except those that a cell closed or replaced by None."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not _is_closed(stream):
            stream.flush()
