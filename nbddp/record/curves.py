"""The numbers that ranks report with ``nbddp.log``, thinned so that a run of any length fits."""

from __future__ import annotations

import math
import operator
import threading
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MAX_BUCKETS = 1000  # of one metric of one rank: more than a chart has pixels for
MAX_NAMES = 64
MAX_NAME = 200  # characters
MAX_DROPPED = 1000  # names that are left out are counted no further
MAX_STEP = 2.0**53  # beyond it there are whole numbers that a float does not have
HUGE = 1e300  # a million values below it can be added up; above it, they count as infinite
PACE_WINDOW = 10.0  # seconds that are the recent past
MARK_PERIOD = 0.25  # seconds between two marks in it


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one rank, in buckets of neighbouring steps; the steps ascend.

    A bucket is one step until there are more than fit. Then it is several, but nothing that stood
    out is lost: its lowest and highest value are kept, and how many values were not finite.

    Attributes:
        steps: mean step of each bucket.
        values: mean of its finite values, NaN if it has none.
        low: the lowest of them, ``high`` the highest, NaN if it has none.
        lost: how many of its values were NaN, infinite or beyond 1e300.
        last: the newest value as it came, whatever it was.
    """

    steps: tuple[float, ...]
    values: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    lost: tuple[int, ...]
    last: float


@dataclass(frozen=True, slots=True)
class Pace:
    """The last step of a rank, its steps per second (0 if not known), and the time of that step.

    ``at`` is the rank's ``time.time()``: a pace that is old says nothing about now.
    """

    step: float
    per_second: float
    at: float


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The metrics at one moment.

    Attributes:
        versions: of each metric, in the order in which they came; another after each change.
        curves: of each rank, for those metrics whose version was not known to who asked.
        left_out: how many more there are without a curve; beyond 1000 they are not counted.
    """

    versions: Mapping[str, int]
    curves: Mapping[str, Mapping[int, Curve]]
    left_out: int


class Curves:
    """Keeps what was reported, a curve for each name and rank; one thread adds, any may read.

    A step that falls back says that the loop was begun again, or taken up from a checkpoint: the
    points from there on are replaced, as TensorBoard does it, to within a bucket. Several values
    of one step are one point.

    A name with more than 200 characters is cut, and ends in "…" and its checksum, so that two of
    them are not taken for one. Names that come when there are 64 are left out and counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version = 0
        self._series: dict[str, dict[int, _Series]] = {}
        self._versions: dict[str, int] = {}
        self._tempos: dict[int, dict[str, _Tempo]] = {}
        self._dropped: set[int] = set()

    @property
    def version(self) -> int:
        """Another number after each change."""
        return self._version

    @property
    def dropped_names(self) -> int:
        """How many names were left out because there were too many; 1000 may be more."""
        return len(self._dropped)

    def version_of(self, name: str) -> int:
        """Another number after each change of this metric; 0 if there is none of this name."""
        return self._versions.get(_bounded(name), 0)

    def add(self, rank: int, at: float, step: float, values: Mapping[str, float]) -> None:
        """A rank reported numbers for a step, at its ``time.time()``."""
        step = float(min(MAX_STEP, max(-MAX_STEP, step)))  # a step may be any whole number
        with self._lock:
            self._version += 1
            for full_name, value in values.items():
                name = _bounded(full_name)
                found = self._series.get(name) or self._find(name)
                if found is None:
                    continue
                if rank not in found:
                    found[rank] = _Series()
                found[rank].add(step, value)
                self._versions[name] = self._version
            self._tempo(rank, values).note(at, step)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._version += 1
            self._series.clear()
            self._versions.clear()
            self._tempos.clear()
            self._dropped.clear()

    def snapshot(self, known: Mapping[str, int] | None = None, *, most: int) -> MetricsSnapshot:
        """The first ``most`` metrics, with the curves of those that are not ``known`` yet."""
        names, known = self.names(), known or {}
        shown = {name: self.version_of(name) for name in names[:most]}
        return MetricsSnapshot(
            versions=shown,
            curves={name: self.curves(name) for name, at in shown.items() if known.get(name) != at},
            left_out=max(0, len(names) - most) + self.dropped_names,
        )

    def names(self) -> list[str]:
        """The metrics that there are, in the order in which they came."""
        with self._lock:
            return list(self._series)

    def curves(self, name: str) -> dict[int, Curve]:
        """The curve of each rank that reported this metric."""
        with self._lock:
            found = self._series.get(_bounded(name), {})
            copies = {rank: (series.columns(), series.last) for rank, series in found.items()}
        return {rank: _curve(*copies[rank]) for rank in sorted(copies)}

    def last(self, name: str) -> dict[int, float]:
        """The newest value of each rank that reported this metric."""
        with self._lock:
            found = self._series.get(_bounded(name), {})
            return {rank: found[rank].last for rank in sorted(found)}

    def pace(self, rank: int) -> Pace | None:
        """How far a rank is and how fast, None if it reported nothing.

        A loop that counts batches and another that counts epochs are not mixed up: of those that
        went on in the recent past, the faster one is the pace.
        """
        with self._lock:
            paces = [tempo.pace() for tempo in self._tempos.get(rank, {}).values()]
        newest = max((each.at for each in paces), default=0.0)
        recent = [each for each in paces if newest - each.at <= PACE_WINDOW]
        return max(recent, key=lambda each: each.per_second, default=None)

    def _find(self, name: str) -> dict[int, _Series] | None:
        """The series of a name that is new, None if it is one too many."""
        if len(self._series) < MAX_NAMES:
            return self._series.setdefault(name, {})
        if len(self._dropped) < MAX_DROPPED:
            self._dropped.add(hash(name))
        return None

    def _tempo(self, rank: int, values: Mapping[str, float]) -> _Tempo:
        """The first name stands for the loop that reports it: each may count steps of its own."""
        name = _bounded(next(iter(values), ""))
        tempos = self._tempos.setdefault(rank, {})
        key = name if name in self._series else ""
        if key not in tempos:
            tempos[key] = _Tempo()
        return tempos[key]


def _bounded(name: str) -> str:
    if len(name) <= MAX_NAME:
        return name
    ending = f"…{zlib.crc32(name.encode(errors='surrogatepass')):08x}"
    return name[: MAX_NAME - len(ending)] + ending


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


class _Series:
    """One metric of one rank: a column for each field of the buckets, and the open bucket."""

    __slots__ = ("_columns", "_open", "_step", "_width", "last")

    def __init__(self) -> None:
        self.last = math.nan
        self._columns = [array("d") for _ in _MERGES]
        self._open = _Bucket()
        self._width = 1  # how many values a bucket takes before the next step opens another
        self._step = math.nan

    def add(self, step: float, value: float) -> None:
        """Put a value into the bucket where it belongs."""
        if step != self._step:
            if step < self._step:
                self._go_back(step)
            elif self._open.count + self._open.lost >= self._width:
                self._close()
            self._step = step
        self._open.add(step, value)
        self.last = value

    def columns(self) -> list[array[float]]:
        """A copy, the open bucket included."""
        fields = zip(self._columns, self._open.row(), strict=True)
        return [column + array("d", (field,)) for column, field in fields]

    def _close(self) -> None:
        for column, field in zip(self._columns, self._open.row(), strict=True):
            column.append(field)
        self._open = _Bucket()
        if len(self._columns[0]) >= MAX_BUCKETS:
            self._columns = [
                array("d", map(merge, column[::2], column[1::2]))
                for merge, column in zip(_MERGES, self._columns, strict=True)
            ]
            self._width *= 2

    def _go_back(self, step: float) -> None:
        """Drop the buckets from this step on."""
        self._close()
        steps, _, _, _, counts, lost = self._columns
        while steps and steps[-1] / (counts[-1] + lost[-1]) >= step:
            for column in self._columns:
                column.pop()
        if not steps:
            self._width = 1


def _curve(columns: list[array[float]], last: float) -> Curve:
    steps, sums, lows, highs, counts, lost = columns
    return Curve(
        steps=tuple(step / (n + bad) for step, n, bad in zip(steps, counts, lost, strict=True)),
        values=tuple(
            # rounding, and sums that overflow, must not take a mean out of its bucket
            min(max(total / n, low), high) if n else math.nan
            for total, low, high, n in zip(sums, lows, highs, counts, strict=True)
        ),
        low=tuple(low if n else math.nan for low, n in zip(lows, counts, strict=True)),
        high=tuple(high if n else math.nan for high, n in zip(highs, counts, strict=True)),
        lost=tuple(map(int, lost)),
        last=last,
    )


class _Tempo:
    """How fast a loop goes, from marks that it left in the recent past."""

    __slots__ = ("_at", "_marks", "_step")

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque()
        self._at = self._step = -math.inf

    def note(self, at: float, step: float) -> None:
        """Remember a step; one that falls back, or a clock that does, begins anew."""
        if step == self._step:
            return
        if step < self._step or at < self._at:
            self._marks.clear()
        self._at, self._step = at, step
        if not self._marks or at - self._marks[-1][0] >= MARK_PERIOD:
            self._marks.append((at, step))
        while len(self._marks) > 1 and at - self._marks[1][0] >= PACE_WINDOW:
            self._marks.popleft()

    def pace(self) -> Pace:
        """Over the recent past, or from one step to the next where that takes longer."""
        at, step = self._marks[0]
        seconds = self._at - at
        per_second = (self._step - step) / seconds if seconds > 0 else 0.0
        return Pace(self._step, per_second, self._at)
