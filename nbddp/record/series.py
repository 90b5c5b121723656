"""One metric of one rank, thinned so that a run of any length fits; its loops follow each other."""

from __future__ import annotations

import math
import operator
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

MAX_BUCKETS = 1000  # of one metric of one rank: more than a chart has pixels for
MAX_MARKS = 64  # of each kind that are kept, the newest: more cannot be told apart
HUGE = 1e300  # a million values below it can be added up; above it, they count as infinite


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one rank, in buckets of neighbouring steps; the steps ascend.

    A bucket is one step until there are more than fit. Then it is several, but nothing that stood
    out is lost: its lowest and highest value are kept, and how many values were not finite.

    Attributes:
        steps: mean step of each bucket; counted on, where a loop was begun again.
        values: mean of its finite values, NaN if it has none.
        low: the lowest of them, ``high`` the highest, NaN if it has none.
        lost: how many of its values were NaN, infinite or beyond 1e300.
        last: the newest value as it came, whatever it was.
        begins: where the step fell back and the count went on, ``falls`` how often that was.
        restarts: where another attempt took the work up.
    """

    steps: tuple[float, ...]
    values: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    lost: tuple[int, ...]
    last: float
    begins: tuple[float, ...] = ()
    falls: int = 0
    restarts: tuple[float, ...] = ()


@dataclass(slots=True)
class _Bucket:
    """Values of one step, or of several."""

    steps: float = 0.0  # their sum
    total: float = 0.0  # of the finite values
    low: float = math.inf
    high: float = -math.inf
    count: int = 0  # of the finite values
    lost: int = 0

    def add(self, step: float, value: float) -> None:
        """Take in a value."""
        self.steps += step
        if not -HUGE < value < HUGE:  # true for NaN
            self.lost += 1
            return
        self.total += value
        self.count += 1
        if value < self.low:
            self.low = value
        if value > self.high:
            self.high = value

    def row(self) -> tuple[float, ...]:
        """Its fields in their order."""
        return self.steps, self.total, self.low, self.high, self.count, self.lost


# how each field of two buckets becomes that of one
_MERGES: tuple[Callable[[float, float], float], ...] = (
    operator.add,
    operator.add,
    min,
    max,
    operator.add,
    operator.add,
)


@dataclass(frozen=True, slots=True)
class Columns:
    """A series as it was at one moment, to be made a curve without holding anybody up."""

    columns: list[array[float]]
    last: float
    begins: tuple[float, ...]
    falls: int
    restarts: tuple[float, ...]

    def curve(self) -> Curve:
        """The curve."""
        steps, sums, lows, highs, counts, lost = self.columns
        if counts.count(1.0) == len(counts) and not any(lost):
            values = tuple(sums)  # most often: every bucket is a value
            return self._curve(tuple(steps), values, values, values, (0,) * len(values))
        if 0.0 in counts:
            means = [total / n if n else math.nan for total, n in zip(sums, counts, strict=True)]
            lows, highs = (
                array("d", (end if n else math.nan for end, n in zip(ends, counts, strict=True)))
                for ends in (lows, highs)
            )
        else:
            means = list(map(operator.truediv, sums, counts))
        return self._curve(
            tuple(map(operator.truediv, steps, map(operator.add, counts, lost))),
            # rounding, and sums that overflow, must not take a mean out of its bucket
            tuple(map(min, map(max, means, lows), highs)),
            tuple(lows),
            tuple(highs),
            tuple(map(int, lost)),
        )

    def _curve(
        self,
        steps: tuple[float, ...],
        values: tuple[float, ...],
        low: tuple[float, ...],
        high: tuple[float, ...],
        lost: tuple[int, ...],
    ) -> Curve:
        marks = self.begins, self.falls, self.restarts
        return Curve(steps, values, low, high, lost, self.last, *marks)


class Series:
    """A column for each field of the buckets, and the open bucket.

    A step that falls back begins the loop again: it is counted on from there, so that nothing
    that was drawn is lost. Only where another attempt takes up the work, and the steps had never
    fallen back before, does it replace what it does again.
    """

    __slots__ = (
        *("_begins", "_columns", "_is_taken_up", "_offset", "_open", "_restarts", "_step"),
        *("_stride", "_width", "falls", "last"),
    )

    def __init__(self) -> None:
        self.last = math.nan
        self.falls = 0
        self._columns = [array("d") for _ in _MERGES]
        self._open = _Bucket()
        self._width = 1  # how many values a bucket takes before the next step opens another
        self._step = math.nan
        self._stride = 1.0  # from one step to the next
        self._offset = 0.0  # what the count is ahead of the steps
        self._is_taken_up = False
        self._begins: deque[float] = deque(maxlen=MAX_MARKS)
        self._restarts: deque[float] = deque(maxlen=MAX_MARKS)

    @property
    def next_place(self) -> float:
        """Where the count goes on."""
        return self._step + self._offset + self._stride

    @property
    def next_step(self) -> float:
        """The step of a value that came without one."""
        return 0.0 if math.isnan(self._step) else self._step + 1.0

    def add(self, step: float, value: float, loops: Loops) -> None:
        """Put a value into the bucket where it belongs; ``loops`` are those of the metric."""
        if step != self._step or self._is_taken_up:
            if self._is_taken_up:
                self._take_up(step, loops)
            elif step < self._step:
                self._begin_again(step, loops)
            elif step > self._step:  # not so for the first, after NaN
                self._stride = step - self._step
            if self._open.count + self._open.lost >= self._width:
                self._close()
            self._step = step
        self._open.add(step + self._offset, value)
        self.last = value

    def take_up(self) -> None:
        """What comes next is from another attempt."""
        self._is_taken_up = not math.isnan(self._step)

    def columns(self) -> Columns:
        """A copy, the open bucket included."""
        pairs = zip(self._columns, self._open.row(), strict=True)
        columns = [column + array("d", (value,)) for column, value in pairs]
        marks = tuple(self._begins), self.falls, tuple(self._restarts)
        return Columns(columns, self.last, *marks)

    def _begin_again(self, step: float, loops: Loops) -> None:
        self.falls += 1
        self._offset = max(loops.offset(self.falls, step), self.next_place - step)
        self._begins.append(step + self._offset)

    def _take_up(self, step: float, loops: Loops) -> None:
        self._is_taken_up = False
        if step <= self._step and self.falls:
            self._begin_again(step, loops)
            self._begins.pop()  # it has a mark of its own
        elif step <= self._step:
            self._drop_from(step)
            while self._restarts and self._restarts[-1] > step:
                self._restarts.pop()
        self._restarts.append(step + self._offset)

    def _close(self) -> None:
        for column, value in zip(self._columns, self._open.row(), strict=True):
            column.append(value)
        self._open = _Bucket()
        if len(self._columns[0]) >= MAX_BUCKETS:
            self._columns = [
                array("d", map(merge, column[::2], column[1::2]))
                for merge, column in zip(_MERGES, self._columns, strict=True)
            ]
            self._width *= 2

    def _drop_from(self, step: float) -> None:
        """Drop the buckets from this step on."""
        self._close()
        steps, _, _, _, counts, lost = self._columns
        while steps and steps[-1] / (counts[-1] + lost[-1]) >= step:
            for column in self._columns:
                column.pop()
        if not steps:
            self._width = 1


@dataclass(slots=True)
class Loops:
    """Where each loop of a metric begins: at the same place for all ranks, which come to it apart.

    Attributes:
        series: those of the metric, by rank.
    """

    series: dict[int, Series] = field(default_factory=dict)
    _offsets: dict[int, float] = field(default_factory=dict)

    def offset(self, loop: int, step: float) -> float:
        """What the count is ahead of the steps in a loop; the first rank in it has ``step``."""
        if loop not in self._offsets:
            self._offsets[loop] = _furthest(self.series.values()) - step
            self._offsets.pop(loop - MAX_MARKS, None)
        return self._offsets[loop]


def _furthest(series: Iterable[Series]) -> float:
    places = [each.next_place for each in series]
    return max(place for place in places if not math.isnan(place))
