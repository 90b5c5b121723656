"""Copy files that grow on a node into the notebook's run folder.

A rank writes its log on its own machine first. New log data is sent before the rank's messages: a
message that names a position in the log arrives after that part of the log.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nbddp.private_files import open_private_file

CHUNK_SIZE = 1 << 20  # bytes of one frame


@dataclass(slots=True)
class _GrowingFile:
    path: Path
    numbers: list[int]  # numbers of the processes that write the file
    sent: int
    whole_lines: bool


class LogSender:
    """Sends new data of the files of one node's ranks.

    Args:
        send: gets the number of a rank's process, the file's name and the new data.
    """

    def __init__(self, send: Callable[[int, str, bytes], None]) -> None:
        self._send = send
        self._files: dict[Path, _GrowingFile] = {}

    def follow(self, number: int, path: Path, *, whole_lines: bool = False) -> None:
        """Send data that is added to this file from now on; the file may not exist yet.

        ``whole_lines``: send whole lines only, because other nodes add to the same copy.
        """
        if path not in self._files:
            size = path.stat().st_size if path.exists() else 0
            self._files[path] = _GrowingFile(path, [], size, whole_lines)
        self._files[path].numbers.append(number)

    def rewind(self, number: int, sizes: Mapping[str, int]) -> None:
        """Send a process's files again from these sizes on."""
        for file in self._files.values():
            if number in file.numbers and file.path.name in sizes:
                file.sent = min(file.sent, sizes[file.path.name])

    def unfollow(self, number: int) -> None:
        """Stop sending data for a process that has exited.

        A file that other processes write, too, is sent for one of them.
        """
        for file in self._files.values():
            file.numbers = [other for other in file.numbers if other != number]
        self._files = {path: each for path, each in self._files.items() if each.numbers}

    def send_new_data(self) -> None:
        """Send the new data of all files."""
        for file in self._files.values():
            self._send_new(file)

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
        except OSError:  # no such file yet, or no file descriptors left: try again next time
            return


class LogReceiver:
    """Copies of one process's files, in the notebook's run folder.

    Args:
        folder: the run folder.
        on_failed: called for each copy that cannot be written. The copy then stays incomplete;
            the node has the whole file.
    """

    def __init__(self, folder: Path, on_failed: Callable[[Path, OSError], None]) -> None:
        self.folder = folder
        self._on_failed = on_failed
        self._open: dict[str, int] = {}
        self._failed: set[str] = set()

    def append(self, name: str, data: bytes) -> None:
        """Append new data to a copy."""
        if name in self._failed:
            return
        try:
            if name not in self._open:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                self._open[name] = open_private_file(self.folder / name, flags)
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
