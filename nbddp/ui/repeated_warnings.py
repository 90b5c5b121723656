"""Show a warning once that several ranks print."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nbddp.errors import format_ranks

# as Python writes them ("file.py:3: UserWarning: text"), and torch's C++ code
_WARNING = re.compile(r"^(?:\[rank\d+\]:\[W[^]]*\] |\S.*?: \w*)Warning: (.*)")


class RepeatedWarnings:
    """Leaves out warnings that another rank has printed in the same cell.

    >>> warnings = RepeatedWarnings()
    >>> printed = ["a.py:3: UserWarning: slow", "  load(x)", "done"]
    >>> warnings.without_repeats(0, printed) == printed
    True
    >>> warnings.without_repeats(1, printed)
    ['done']
    >>> warnings.note()
    'rank 1 printed 1 of these warnings, too'
    """

    def __init__(self) -> None:
        self._first_ranks: dict[str, int] = {}
        self._repeats: set[str] = set()
        self._repeating_ranks: set[int] = set()
        self._left_out: set[int] = set()  # ranks whose last line was a warning of Python, left out

    def without_repeats(self, rank: int, lines: Sequence[str]) -> Sequence[str]:
        """Return the lines of a rank that are shown."""
        if not (rank in self._left_out or any("Warning: " in line for line in lines)):
            return lines
        return [line for line in lines if not self._is_repeat(rank, line)]

    def _is_repeat(self, rank: int, line: str) -> bool:
        found = _WARNING.search(line)
        if found is None:  # Python writes the line of the code below the warning
            is_repeat = rank in self._left_out and line.startswith("  ")
            self._left_out.discard(rank)
            return is_repeat
        is_python = not line.startswith("[rank")
        text = line if is_python else found[1]
        is_repeat = self._first_ranks.setdefault(text, rank) != rank
        if is_repeat:
            self._repeats.add(text)
            self._repeating_ranks.add(rank)
        (self._left_out.add if is_repeat and is_python else self._left_out.discard)(rank)
        return is_repeat

    def note(self) -> str:
        """Return a line that tells which ranks repeated warnings; empty if none did."""
        if not self._repeats:
            return ""
        ranks = format_ranks(sorted(self._repeating_ranks))
        return f"{ranks} printed {len(self._repeats):,} of these warnings, too"
