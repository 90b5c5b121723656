"""Show a warning once that several ranks print."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from nbddp.errors import format_ranks

# as Python writes them ("file.py:3: UserWarning: text"), and torch's C++ code
_WARNING = re.compile(
    r"^(?:\[rank\d+\]:\[W[^]]*\] |(?:<[^>]+>|Cell In\[\d+\]|/[^:]*|\S+\.py):\d+: \w*)Warning: (.*)"
)
MAX_REST = 4  # lines of a warning below its first


@dataclass
class _Warning:
    """The rank that printed a warning first, and the lines below its first line.

    ``is_whole`` tells that the last of them is the line of the code, which ends a warning.
    """

    rank: int
    rest: list[str] = field(default_factory=list)
    is_whole: bool = False


class RepeatedWarnings:
    """Leaves out warnings that another rank has printed in the same cell.

    >>> warnings = RepeatedWarnings()
    >>> printed = ["a.py:3: UserWarning: slow", "  load(x)", "done"]
    >>> warnings.without_repeats(0, printed) == printed
    True
    >>> warnings.without_repeats(1, printed)
    ['done']
    >>> warnings.note()
    'warnings of rank 1 that another rank had printed are only in the logs'
    """

    def __init__(self) -> None:
        self._shown: dict[str, _Warning] = {}
        self._repeating_ranks: set[int] = set()
        self._current: dict[int, _Warning] = {}  # the warning that a rank's lines belong to
        self._rest_counts: dict[int, int] = {}  # how many of its lines have come

    def without_repeats(self, rank: int, lines: Sequence[str]) -> Sequence[str]:
        """Return the lines of a rank that are shown."""
        if not (rank in self._current or any("Warning: " in line for line in lines)):
            return lines
        return [line for line in lines if not self._is_repeat(rank, line)]

    def _is_repeat(self, rank: int, line: str) -> bool:
        found = _WARNING.search(line)
        if found is None:
            return self._is_rest_of_repeat(rank, line)
        is_python = not line.startswith("[rank")
        text = line if is_python else found[1]
        warning = self._shown.setdefault(text, _Warning(rank))
        if is_python:
            self._current[rank], self._rest_counts[rank] = warning, 0
        if warning.rank == rank:
            return False
        self._repeating_ranks.add(rank)
        return True

    def _is_rest_of_repeat(self, rank: int, line: str) -> bool:
        """Return whether a line belongs to the repeated warning above it."""
        warning = self._current.get(rank)
        if warning is None:
            return False
        number = self._rest_counts[rank]
        self._rest_counts[rank] += 1
        is_code = line.startswith("  ")  # the last line of a warning is that of the code
        if warning.rank == rank:
            warning.rest[number:] = [line]
            warning.is_whole = is_code
            is_repeat = False
        else:
            is_repeat = warning.is_whole and warning.rest[number : number + 1] == [line]
        if is_code or number + 1 >= MAX_REST or (warning.rank != rank and not is_repeat):
            del self._current[rank]
        return is_repeat

    def note(self) -> str:
        """Return a line that tells which ranks repeated warnings; empty if none did."""
        if not self._repeating_ranks:
            return ""
        ranks = format_ranks(sorted(self._repeating_ranks))
        return f"warnings of {ranks} that another rank had printed are only in the logs"
