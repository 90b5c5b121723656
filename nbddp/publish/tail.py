"""The lines of a file that grows, as far as they are whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

AT_ONCE = 1 << 20  # bytes


class Tail:
    """What was appended to a file of JSON objects since it was read last."""

    def __init__(self, path: Path, *needed: str) -> None:
        self._path = path
        self._needed = {"time", *needed}
        self._at = 0
        self._begun = b""  # of a line whose end is not there yet

    def read(self, *, is_over: bool = False) -> list[dict[str, Any]]:
        """The next whole rows, a million bytes at most; what is no row is left out.

        Args:
            is_over: nothing more will be appended: a last line without its end counts.

        Raises:
            OSError: the file is there and cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read(AT_ONCE)
        except FileNotFoundError:  # nothing was reported so far
            return []
        self._at += len(data)
        *lines, self._begun = (self._begun + data).split(b"\n")
        if is_over and not data:
            lines, self._begun = [*lines, self._begun], b""
        return list(self._rows(lines))

    def _rows(self, lines: list[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines:
            try:
                row = json.loads(line) if line else None
            except (ValueError, RecursionError):  # a full disk or a killed rank has torn it
                continue
            if (
                isinstance(row, dict)
                and row.keys() >= self._needed
                and isinstance(row["time"], int | float)
            ):
                yield row
