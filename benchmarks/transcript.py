"""The output that a client received, line by line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

LINE_LENGTH = 100
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_UP = re.compile(r"up \d+")
_TICK = re.compile(r"tick (\d+\.\d+)")
_BURST = re.compile(r"burst (\d+\.\d+)")
_LINE = re.compile(r"(?:\[rank (\d+)\] )?(line (\d+) (\d{6}) x+)")


class Transcript:
    """Lines with the arrival times of their ends."""

    def __init__(self, chunks: Iterable[tuple[float, str]]) -> None:
        self.lines = list(_lines(chunks))

    def last_up(self) -> float:
        """Return when the ready line of the last rank came."""
        return max(at for at, line in self.lines if _UP.search(line))

    def tick_delays(self) -> list[float]:
        """Return the seconds from the print of each tick to its receipt."""
        found = ((at, _TICK.search(line)) for at, line in self.lines)
        return [at - float(tick[1]) for at, tick in found if tick]

    def burst_seconds(self) -> float:
        """Return the seconds from the first print of the burst to the last receipt."""
        found = (_BURST.search(line) for _, line in self.lines)
        return self.lines[-1][0] - next(float(burst[1]) for burst in found if burst)

    def lines_in_order(self, *, ranks: int, lines: int) -> float:
        """Return the share of the burst's lines that came whole, once and in order."""
        numbers = sorted(self._numbers(), key=lambda pair: pair[0])  # the sort is stable
        good = 0
        for _, group in groupby(numbers, key=lambda pair: pair[0]):
            good += _count_rising([number for _, number in group])
        return good / (ranks * lines)

    def _numbers(self) -> Iterator[tuple[int, int]]:
        for _, line in self.lines:
            match = _LINE.fullmatch(line)
            if match is None or len(match[2]) != LINE_LENGTH:
                continue
            if match[1] in (None, match[3]):  # a tag, if present, names the right rank
                yield int(match[3]), int(match[4])


def _lines(chunks: Iterable[tuple[float, str]]) -> Iterator[tuple[float, str]]:
    partial = ""
    for at, text in chunks:
        *complete, partial = (partial + text).split("\n")
        for line in complete:
            yield at, _COLOR.sub("", line)
    if partial:
        yield at, _COLOR.sub("", partial)


def _count_rising(numbers: list[int]) -> int:
    count, last = 0, -1
    for number in numbers:
        if number > last:
            count, last = count + 1, number
    return count
