"""The last lines that ranks wrote in one cell, for a view that is redrawn as they come."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from nbddp.record.log_reader import MAX_KEPT_LINE, LineAssembler, log_name


@dataclass(frozen=True, slots=True)
class Line:
    """A line as it is shown.

    Attributes:
        ranks: whose it is; empty for nbddp's own words.
        text: as it was written, escape sequences included.
        mark: a word before the ranks, like ``Out``.
        at: when it came, as ``time.time()`` has it; 0 where that is not known.
    """

    ranks: tuple[int, ...]
    text: str
    mark: str = ""
    at: float = field(default=0.0, compare=False)


class Tails:
    r"""Keeps the last lines of every rank, and of all together in the order they came.

    What a rank has begun and not ended, like a progress bar, is its last line for the time
    being. One thread writes and reads: nothing here is locked.

    >>> tails = Tails(max_lines=2)
    >>> tails.write(1, "a\nb\nc\n\r10%"), tails.write(1, "\r20%")
    (None, None)
    >>> [line.text for line in tails.of(1)], tails.earlier(1)
    (['b', 'c', '20%'], 1)

    Args:
        max_lines: that are kept of each rank.
        max_merged: and of all together; as many if it is not said.

    Attributes:
        version: another number whenever there is something new to see.
    """

    def __init__(self, *, max_lines: int = 500, max_merged: int | None = None) -> None:
        self._max_lines = max_lines
        self._merged = _Tail(max_merged or max_lines)
        self._ranks: dict[int, _RankTail] = {}
        self.version = 0

    def write(self, rank: int, text: str) -> None:
        """Take a piece of a rank's output, cut anywhere."""
        if text:
            tail = self._ranks.setdefault(rank, _RankTail(rank, self._max_lines))
            self._keep(rank, tail.assembler.add(text))
            self.version += 1

    def say(self, text: str) -> None:
        """Take words of nbddp's own, in one line or several."""
        self._merged.extend((), text.rstrip("\n").split("\n"))
        self.version += 1

    def flush(self, rank: int | None = None) -> None:
        """Make a line of what has no end yet, of one rank or of all: no more of it will come."""
        for each in sorted(self._ranks) if rank is None else [rank]:
            if each in self._ranks:
                self._keep(each, self._ranks[each].assembler.flush())
        self.version += 1

    def merged(self) -> list[Line]:
        """The last lines of all ranks as they came, then what each is writing now."""
        return self._merged.lines() + self.unended()

    def of(self, rank: int) -> list[Line]:
        """The last lines of one rank, what it is writing now included."""
        tail = self._ranks.get(rank)
        return tail.lines() + self._partial(rank) if tail else []

    def earlier(self, rank: int | None = None) -> int:
        """How many lines of one rank, or of all, were there and are not kept."""
        tail = self._tail(rank)
        return tail.earlier if tail else 0

    def total(self, rank: int | None = None) -> int:
        """How many lines of one rank, or of all, have been ended."""
        tail = self._tail(rank)
        return tail.total if tail else 0

    def newest(self, count: int, rank: int | None = None) -> list[Line]:
        """The last ``count`` lines that were ended, of one rank or of all, as far as kept."""
        tail = self._tail(rank)
        return tail.lines(count) if tail else []

    def unended(self, rank: int | None = None) -> list[Line]:
        """What one rank, or each, is writing now."""
        ranks = sorted(self._ranks) if rank is None else [rank]
        return [line for each in ranks if each in self._ranks for line in self._partial(each)]

    def _tail(self, rank: int | None) -> _Tail | None:
        return self._merged if rank is None else self._ranks.get(rank)

    def _keep(self, rank: int, lines: Sequence[str]) -> None:
        self._ranks[rank].extend((rank,), lines)
        self._merged.extend((rank,), lines)

    def _partial(self, rank: int) -> list[Line]:
        partial = self._ranks[rank].assembler.partial
        return [Line((rank,), partial)] if partial else []


class _Tail:
    """The last lines, and how many there were in all."""

    def __init__(self, max_lines: int) -> None:
        # not yet as Line: of a flood, most are gone before they are ever shown
        self._kept: deque[tuple[tuple[int, ...], str, float]] = deque(maxlen=max_lines)
        self.total = 0

    @property
    def earlier(self) -> int:
        """How many are not kept."""
        return self.total - len(self._kept)

    def extend(self, ranks: tuple[int, ...], lines: Sequence[str]) -> None:
        """Take lines, in order."""
        if lines:
            at = time.time()
            self._kept.extend((ranks, line, at) for line in lines)
            self.total += len(lines)

    def lines(self, count: int | None = None) -> list[Line]:
        """Those that are kept, or the last of them."""
        kept = self._kept if count is None else [*islice(reversed(self._kept), count)][::-1]
        return [Line(ranks, text, at=at) for ranks, text, at in kept]


class _RankTail(_Tail):
    """The same for one rank, whose output comes in pieces."""

    def __init__(self, rank: int, max_lines: int) -> None:
        super().__init__(max_lines)
        self.assembler = LineAssembler(log_name(rank), max_line=MAX_KEPT_LINE)
