"""Files that grow on a node, and their copies in the notebook's run folder.

A rank writes its log on its own machine first, as everywhere. What is new in it is sent before
anything else that the rank says, so that whoever is told where a line stands finds it there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

CHUNK_SIZE = 1 << 20  # bytes sent at once


@dataclass(slots=True)
class _GrowingFile:
    path: Path
    numbers: list[int]  # of the processes that write it
    sent: int
    whole_lines: bool


class LogSender:
    """Sends what is new in the files of one node's ranks.

    Args:
        send: takes the number of a rank's process, the file's name and what is new in it.
    """

    def __init__(self, send: Callable[[int, str, bytes], None]) -> None:
        self._send = send
        self._files: dict[Path, _GrowingFile] = {}

    def follow(self, number: int, path: Path, *, whole_lines: bool = False) -> None:
        """Send what comes from here on into this file, which may not be there yet.

        With ``whole_lines`` no part of a line, for those of other nodes go into the same copy.
        """
        if path not in self._files:
            size = path.stat().st_size if path.exists() else 0
            self._files[path] = _GrowingFile(path, [], size, whole_lines)
        self._files[path].numbers.append(number)

    def rewind(self, number: int, sizes: Mapping[str, int]) -> None:
        """Send again what has not arrived of these files that a process writes."""
        for each in self._files.values():
            if number in each.numbers and each.path.name in sizes:
                each.sent = min(each.sent, sizes[each.path.name])

    def unfollow(self, number: int) -> None:
        """Send nothing more under the number of a process, which has ended.

        A file that other processes also write is sent under the number of one of them.
        """
        for each in self._files.values():
            each.numbers = [other for other in each.numbers if other != number]
        self._files = {path: each for path, each in self._files.items() if each.numbers}

    def send_new_data(self) -> None:
        """Look at all files, and send what is new."""
        for each in self._files.values():
            self._send_new(each)

    def _send_new(self, growing: _GrowingFile) -> None:
        try:
            if growing.path.stat().st_size <= growing.sent:
                return
            with growing.path.open("rb") as file:
                file.seek(growing.sent)
                while data := file.read(CHUNK_SIZE):
                    if growing.whole_lines:
                        data = data[: data.rfind(b"\n") + 1]
                    if not data:
                        return
                    growing.sent += len(data)
                    file.seek(growing.sent)
                    self._send(growing.numbers[-1], growing.path.name, data)
        except OSError:  # it is not there yet, or a cell has taken all descriptors: next time
            return


class LogReceiver:
    """Copies of the files that one process writes on a node, in the notebook's run folder.

    Args:
        folder: the run's.
        on_failed: told of each copy that cannot be written, and why. It stays as it is then: the
            node has the whole file.
    """

    def __init__(self, folder: Path, on_failed: Callable[[Path, OSError], None]) -> None:
        self.folder = folder
        self._on_failed = on_failed
        self._open: dict[str, int] = {}
        self._failed: set[str] = set()

    def append(self, name: str, data: bytes) -> None:
        """Add what is new in the original to a copy."""
        if name in self._failed:
            return
        try:
            if name not in self._open:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                self._open[name] = os.open(self.folder / name, flags, 0o600)
            view = memoryview(data)
            while view:
                view = view[os.write(self._open[name], view) :]
        except OSError as error:
            self._failed.add(name)
            self._on_failed(self.folder, error)

    def close(self) -> None:
        """Close the copies."""
        for file in self._open.values():
            os.close(file)
        self._open.clear()
