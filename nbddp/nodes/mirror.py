"""Files that grow on a node, and their copies in the notebook's run folder.

A rank writes its log on its own machine first, as everywhere. What is new in it is sent before
anything else that the rank says, so that whoever is told where a line stands finds it there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PIECE = 1 << 20  # bytes sent at once


@dataclass(slots=True)
class _Growing:
    path: Path
    number: int
    sent: int
    whole_lines: bool


class Outlet:
    """Sends what is new in the files of one node's ranks.

    Args:
        send: takes the number of a rank's process, the file's name and what is new in it.
    """

    def __init__(self, send: Callable[[int, str, bytes], None]) -> None:
        self._send = send
        self._files: dict[Path, _Growing] = {}

    def follow(self, number: int, path: Path, *, whole_lines: bool = False) -> None:
        """Send what comes from here on into this file, which may not be there yet.

        With ``whole_lines`` no part of a line, for those of other nodes go into the same copy.
        """
        if path not in self._files:
            size = path.stat().st_size if path.exists() else 0
            self._files[path] = _Growing(path, number, size, whole_lines)
        self._files[path].number = number

    def rewind(self, number: int, sizes: Mapping[str, int]) -> None:
        """Send again what has not arrived of these files that a process writes."""
        for each in self._files.values():
            if each.number == number and each.path.name in sizes:
                each.sent = min(each.sent, sizes[each.path.name])

    def forget(self, number: int) -> None:
        """Send nothing more of a process."""
        self._files = {path: each for path, each in self._files.items() if each.number != number}

    def send_news(self) -> None:
        """Look at all files, and send what is new."""
        for each in self._files.values():
            self._send_new(each)

    def _send_new(self, growing: _Growing) -> None:
        try:
            if growing.path.stat().st_size <= growing.sent:
                return
            with growing.path.open("rb") as file:
                file.seek(growing.sent)
                while data := file.read(PIECE):
                    if growing.whole_lines:
                        data = data[: data.rfind(b"\n") + 1]
                    if not data:
                        return
                    growing.sent += len(data)
                    file.seek(growing.sent)
                    self._send(growing.number, growing.path.name, data)
        except OSError:  # it is not there yet, or a cell has taken all descriptors: next time
            return


class Inlet:
    """The copies, in the run folder of the notebook."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def append(self, path: Path, data: bytes) -> None:
        """Add to a copy what its original has more."""
        if path not in self._open:
            self._open[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        view = memoryview(data)
        while view:
            view = view[os.write(self._open[path], view) :]

    def close(self) -> None:
        """Nothing more comes."""
        for file in self._open.values():
            os.close(file)
        self._open.clear()
