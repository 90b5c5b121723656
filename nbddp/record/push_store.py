"""Store pushed values as they were sent, so that a replay can send them again.

The pickles are in one anonymous file in the run's folder. They take no memory in the notebook, no
other process can open them, and the system deletes them even if the kernel is killed. They share a
file because 1,019 files would use up the descriptors of a kernel. A push that cannot be written is
not stored: the user gets a message at once, and a replay tells what to push again.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbddp.errors import RequestError


class _PickleFile:
    """An anonymous file."""

    def __init__(self, folder: Path | None) -> None:
        with tempfile.TemporaryFile(dir=folder) as file:
            self.fd = os.dup(file.fileno())
        self.end = 0

    def append(self, data: bytes) -> StoredPickle:
        rest, at = memoryview(data), self.end
        try:
            while rest:
                written = os.pwrite(self.fd, rest, at)
                rest, at = rest[written:], at + written
        except OSError:
            os.ftruncate(self.fd, self.end)  # free the part that was written
            raise
        stored = StoredPickle(self, self.end, len(data))
        self.end = at
        return stored


@dataclass(frozen=True, slots=True)
class StoredPickle:
    """A pickle in a file."""

    _file: _PickleFile
    _start: int
    _size: int

    def read(self) -> bytes:
        """Return the stored bytes.

        Raises:
            OSError: they cannot be read.
        """
        data = bytearray()
        while len(data) < self._size:  # one call reads at most 2 GiB
            part = os.pread(self._file.fd, self._size - len(data), self._start + len(data))
            if not part:
                raise OSError(errno.EIO, "the file is too short")
            data += part
        return bytes(data)


@dataclass(frozen=True, slots=True)
class PushRecord:
    """A push of values to ranks.

    Attributes:
        names: the variables' names in the ranks.
        ranks: the ranks; None for all ranks.
        stored: the pickle; None if it could not be stored.
        reason: why it could not be stored.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...] | None
    stored: StoredPickle | None
    reason: str = ""

    @property
    def notice(self) -> str:
        """A message for the user if the values could not be stored; else empty."""
        if self.stored is not None:
            return ""
        return f"{', '.join(self.names)}: not kept for a replay: {self.reason}"

    def data(self) -> bytes:
        """Return the pickled values, as they were sent.

        Raises:
            RequestError: they are not stored.
        """
        reason = self.reason
        if self.stored is not None:
            try:
                return self.stored.read()
            except OSError as error:
                reason = str(error.strerror)
        raise RequestError(
            f"the replay ends here: {', '.join(self.names)} was pushed and is not kept "
            f"({reason}); push it and run the later cells again"
        )


class PushStore:
    """Stores pushes. Starts a new file when no record refers to the last one. Thread-safe.

    The weak reference has no callback: one would run at any place of the main thread, and a SIGINT
    that arrives in a callback is lost.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._fd = -1
        self._file: Callable[[], _PickleFile | None] = lambda: None

    def add(
        self, names: Sequence[str], ranks: Sequence[int] | None, data: bytes, folder: Path | None
    ) -> PushRecord:
        """Store pushed values in the anonymous file.

        ``folder``: where to create the file if there is none; None for the system's own folder.
        """
        targets = None if ranks is None else tuple(ranks)
        try:
            with self._lock:
                self.free()
                file = self._file()
                if file is None:
                    file = _PickleFile(folder)
                    self._fd, self._file = file.fd, weakref.ref(file)
                return PushRecord(tuple(names), targets, file.append(data))
        except OSError as error:
            return PushRecord(tuple(names), targets, None, str(error.strerror))

    def free(self) -> None:
        """Free the disk space if no record refers to it."""
        with self._lock:
            if self._file() is None and self._fd >= 0:
                fd, self._fd = self._fd, -1
                os.close(fd)


def pickle_values(values: Mapping[str, Any], numbers: Mapping[str, int]) -> bytes:
    """Pickle values for a push; ``numbers`` are the prompt numbers of cells, by file name.

    Raises:
        RequestError: a value cannot be pickled.
    """
    from nbddp.wire.function_sources import dumps_with_sources

    try:
        return dumps_with_sources(dict(values), numbers)
    except Exception as error:  # a value may raise any exception
        raise RequestError(f"cannot push {_unpicklable_names(values)}: {error}") from error


def _unpicklable_names(values: Mapping[str, Any]) -> str:
    """Return the first name with a value that cannot be pickled; all names if each value can."""
    import cloudpickle

    for name, value in values.items():
        try:
            cloudpickle.dumps(value)
        except Exception:  # noqa: BLE001 - any error means no
            return repr(name)
    return ", ".join(repr(name) for name in values)
