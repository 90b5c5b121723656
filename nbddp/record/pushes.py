"""What was pushed to ranks, kept as it was sent: a replay sends the same again.

The pickled bytes lie in one file without a name, in the run's folder: nobody else can open it, the
notebook's memory does not grow with it, and it is gone with the kernel however that ends. What the
file cannot take, for want of space or beyond 2 GiB, is not kept: that is said at once, and a replay
that comes to it says what to push again.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from nbddp.errors import RequestError

MAX_KEPT = 2 << 30  # bytes


class Kept:
    """Bytes in the file, for as long as somebody holds this."""

    def __init__(self, file: BinaryIO, at: int, size: int) -> None:
        self._file = file
        self._at = at
        self._size = size

    def read(self) -> bytes:
        """The bytes, as they were put in.

        Raises:
            OSError: they cannot be had any more.
        """
        data = bytearray()
        while len(data) < self._size:
            try:
                more = os.pread(self._file.fileno(), self._size - len(data), self._at + len(data))
            except ValueError as error:  # the file was closed
                raise OSError(errno.EBADF, "the group was closed") from error
            if not more:
                raise OSError(errno.EIO, "the file is too short")
            data += more
        return bytes(data)


@dataclass(frozen=True, slots=True)
class Pushed:
    """Values that were sent to ranks; None for all.

    Attributes:
        names: what they are called there.
        kept: what was sent, None if it could not be kept, for a ``reason``.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...] | None
    kept: Kept | None
    reason: str = ""

    @property
    def remark(self) -> str:
        """What the user should know at once; empty if all is well."""
        if self.kept is not None:
            return ""
        return f"{', '.join(self.names)}: not kept for a replay: {self.reason}"

    def data(self) -> bytes:
        """The pickled values, as they were sent.

        Raises:
            RequestError: they were not kept.
        """
        reason = self.reason
        if self.kept is not None:
            try:
                return self.kept.read()
            except OSError as error:
                reason = str(error.strerror)
        raise RequestError(
            f"the replay ends here: {', '.join(self.names)} was pushed and is not kept "
            f"({reason}); push it and run the later cells again"
        )


class Pushes:
    """Keeps what was pushed; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._end = 0
        self._held: weakref.WeakSet[Kept] = weakref.WeakSet()

    def keep(
        self, names: Sequence[str], ranks: Sequence[int] | None, data: bytes, folder: Path | None
    ) -> Pushed:
        """Keep what is sent now; ``folder`` is where there is space for it."""
        whom = None if ranks is None else tuple(ranks)
        try:
            return Pushed(tuple(names), whom, self._put(data, folder))
        except OSError as error:
            return Pushed(tuple(names), whom, None, str(error.strerror))

    def _put(self, data: bytes, folder: Path | None) -> Kept:
        with self._lock:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            if not self._held:
                self._end = 0
            if self._end + len(data) > MAX_KEPT:
                raise OSError(errno.EFBIG, "what was pushed has come to 2 GiB")
            self._write(self._file.fileno(), data)
            kept = Kept(self._file, self._end, len(data))
            self._held.add(kept)
            self._end += len(data)
            return kept

    def _write(self, fd: int, data: bytes) -> None:
        os.ftruncate(fd, self._end)  # what nobody holds any more, or half of what did not fit
        rest, at = memoryview(data), self._end
        try:
            while rest:
                written = os.pwrite(fd, rest, at)
                rest, at = rest[written:], at + written
        except OSError:
            os.ftruncate(fd, self._end)
            raise

    def close(self) -> None:
        """Free the space."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file, self._end = None, 0
            self._held.clear()


def pickled(values: Mapping[str, Any], numbers: Mapping[str, int]) -> bytes:
    """Values as they are sent; ``numbers`` are those of the prompts of cells.

    Raises:
        RequestError: one cannot be pickled.
    """
    from nbddp.wire.sources import dumps_with_sources

    with naming_culprit(values):
        return dumps_with_sources(dict(values), numbers)


@contextmanager
def naming_culprit(values: Mapping[str, Any]) -> Iterator[None]:
    """Within it these values are pickled; which of them cannot be is said.

    Raises:
        RequestError: one cannot be pickled.
    """
    try:
        yield
    except Exception as error:  # whatever a value's own pickling raises
        raise RequestError(f"cannot push {_culprit(values)}: {error}") from error


def _culprit(values: Mapping[str, Any]) -> str:
    """Which of some values cannot be pickled; all of them if each alone can."""
    import cloudpickle

    for name, value in values.items():
        try:
            cloudpickle.dumps(value)
        except Exception:  # noqa: BLE001 - this is the question
            return repr(name)
    return ", ".join(repr(name) for name in values)
