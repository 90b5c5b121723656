"""The numbers that ranks report with ``nbddp.log``, thinned so that a run of any length fits."""

from __future__ import annotations

import math
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from nbddp.record.series import Curve, Loops, Series

MAX_NAMES = 64
MAX_NAME = 200  # characters
MAX_DROPPED = 10_000  # names that are left out are counted no further
MAX_STEP = 2.0**53  # beyond it there are whole numbers that a float does not have
PACE_WINDOW = 10.0  # seconds that are the recent past
FEWEST = 5  # times between two marks from which one knows how they vary
MARK_PERIOD = 0.25  # seconds between two marks in it


@dataclass(frozen=True, slots=True)
class Pace:
    """The last step of a rank, its steps per second (0 if not known), and the time of that step.

    Attributes:
        at: the rank's ``time.time()``: a pace that is old says nothing about now.
        seconds: the time in which it was seen.
        error: the standard error of ``per_second``, as a share of it.
        loop: the first name that is reported with these steps.
    """

    step: float
    per_second: float
    at: float
    seconds: float = field(default=0.0, compare=False)
    error: float = field(default=math.inf, compare=False)
    loop: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The metrics at one moment.

    Attributes:
        versions: of each metric, in the order in which they came; another after each change.
        curves: of each rank, for those metrics whose version was not known to who asked.
        left_out: how many more there are without a curve.
        is_at_least: whether there may be more than so many: they were counted no further.
        falls: of those metrics whose step fell back, how often it did.
        others: the names of those that are left out, as far as they were kept.
    """

    versions: Mapping[str, int]
    curves: Mapping[str, Mapping[int, Curve]]
    left_out: int
    falls: Mapping[str, int] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    is_at_least: bool = False


class Curves:
    """Keeps what was reported, a curve for each name and rank; one thread adds, any may read.

    A step that falls back says that the loop was begun again: the count goes on, for all ranks
    from the same place, and nothing is lost. Where another attempt takes up the work, it replaces
    what is done a second time, to within a bucket. Several values of one step are one point.

    A name with more than 200 characters is cut, and ends in "…" and its checksum, so that two of
    them are not taken for one. Names that come when there are 64 are left out and counted.

    Args:
        wanted: whether a name is asked for: 64 such are kept, whatever came before them.
    """

    def __init__(self, wanted: Callable[[str], bool] = lambda _name: False) -> None:
        self._wanted = wanted
        self._room = MAX_NAMES  # for those that are wanted
        self._lock = threading.Lock()
        self._version = 0
        self._metrics: dict[str, Loops] = {}
        self._versions: dict[str, int] = {}
        self._tempos: dict[int, dict[str, _Tempo]] = {}
        self._dropped: set[int] = set()

    @property
    def version(self) -> int:
        """Another number after each change."""
        return self._version

    @property
    def dropped_names(self) -> int:
        """How many names were left out because there were too many."""
        return len(self._dropped)

    @property
    def drops_more(self) -> bool:
        """Whether more may have been left out: they are counted to a bound."""
        return len(self._dropped) >= MAX_DROPPED

    def version_of(self, name: str) -> int:
        """Another number after each change of this metric; 0 if there is none of this name."""
        return self._versions.get(_bounded(name), 0)

    def add(self, rank: int, at: float, step: float | None, values: Mapping[str, float]) -> None:
        """A rank reported numbers for a step, at its ``time.time()``.

        Where it gave no step, each name counts on by itself.
        """
        if step is not None:  # it may be any whole number
            step = float(min(MAX_STEP, max(-MAX_STEP, step)))
        with self._lock:
            self._version += 1
            reached = 0.0 if step is None else step
            for full_name, value in values.items():
                name = _bounded(full_name)
                metric = self._metrics.get(name) or self._find(name)
                if metric is None:
                    continue
                series = metric.series.get(rank)
                if series is None:
                    series = metric.series[rank] = Series()
                here = series.next_step if step is None else step
                series.add(here, value, metric)
                reached = max(reached, here)
                self._versions[name] = self._version
            self._tempo(rank, values).note(at, reached)

    def take_up(self) -> None:
        """What comes next is from another attempt at the same work."""
        with self._lock:
            for metric in self._metrics.values():
                for series in metric.series.values():
                    series.take_up()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._version += 1
            self._metrics.clear()
            self._versions.clear()
            self._tempos.clear()
            self._dropped.clear()
            self._room = MAX_NAMES

    def snapshot(
        self,
        known: Mapping[str, int] | None = None,
        *,
        most: int,
        chosen: Collection[str] | None = None,
    ) -> MetricsSnapshot:
        """The chosen metrics, or the first ``most``, with the curves of what is not ``known``."""
        names, known = self.names(), known or {}
        taken = names[:most] if chosen is None else [each for each in names if each in chosen]
        shown = {name: self.version_of(name) for name in taken}
        return MetricsSnapshot(
            versions=shown,
            curves={name: self.curves(name) for name, at in shown.items() if known.get(name) != at},
            left_out=len(names) - len(taken) + self.dropped_names,
            falls={name: count for name in shown if (count := self.falls(name))},
            others=tuple(name for name in names if name not in shown),
            is_at_least=self.drops_more,
        )

    def names(self) -> list[str]:
        """The metrics that there are, in the order in which they came."""
        with self._lock:
            return list(self._metrics)

    def curves(self, name: str) -> dict[int, Curve]:
        """The curve of each rank that reported this metric."""
        with self._lock:
            copies = {rank: each.columns() for rank, each in self._of(name).items()}
        return {rank: copies[rank].curve() for rank in sorted(copies)}

    def last(self, name: str) -> dict[int, float]:
        """The newest value of each rank that reported this metric."""
        with self._lock:
            found = self._of(name)
            return {rank: found[rank].last for rank in sorted(found)}

    def falls(self, name: str) -> int:
        """How often the step of this metric fell back, on the rank where it did so most."""
        with self._lock:
            return max((each.falls for each in self._of(name).values()), default=0)

    def pace(self, rank: int) -> Pace | None:
        """How far a rank is and how fast, None if it reported nothing.

        A loop that counts batches and another that counts epochs are not mixed up: of those that
        went on in the recent past, the faster one is the pace.
        """
        with self._lock:
            paces = [tempo.pace(loop) for loop, tempo in self._tempos.get(rank, {}).items()]
        newest = max((each.at for each in paces), default=0.0)
        recent = [each for each in paces if newest - each.at <= PACE_WINDOW]
        return max(recent, key=lambda each: each.per_second, default=None)

    def _of(self, name: str) -> dict[int, Series]:
        metric = self._metrics.get(_bounded(name))
        return metric.series if metric else {}

    def _find(self, name: str) -> Loops | None:
        """A metric of a name that is new, None if it is one too many."""
        number = hash(name)
        if number in self._dropped:  # nearly always, where there are so many
            return None
        is_wanted = self._room > 0 and self._wanted(name)
        if is_wanted or len(self._metrics) < MAX_NAMES:
            self._room -= is_wanted
            return self._metrics.setdefault(name, Loops())
        if len(self._dropped) < MAX_DROPPED:
            self._dropped.add(number)
        return None

    def _tempo(self, rank: int, values: Mapping[str, float]) -> _Tempo:
        """The first name stands for the loop that reports it: each may count steps of its own."""
        name = _bounded(next(iter(values), ""))
        tempos = self._tempos.setdefault(rank, {})
        key = name if name in self._metrics else ""
        if key not in tempos:
            tempos[key] = _Tempo()
        return tempos[key]


def _bounded(name: str) -> str:
    if len(name) <= MAX_NAME:
        return name
    ending = f"…{zlib.crc32(name.encode(errors='surrogatepass')):08x}"
    return name[: MAX_NAME - len(ending)] + ending


class _Tempo:
    """How fast a loop goes, from marks that it left in the recent past."""

    __slots__ = ("_at", "_known", "_marks", "_step")

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque()
        self._at = self._step = -math.inf
        self._known: Pace | None = None  # what is asked for several times between two steps

    def note(self, at: float, step: float) -> None:
        """Remember a step; one that falls back, or a clock that does, begins anew."""
        if step == self._step:
            return
        if step < self._step or at < self._at:
            self._marks.clear()
        self._at, self._step, self._known = at, step, None
        if not self._marks or at - self._marks[-1][0] >= MARK_PERIOD:
            self._marks.append((at, step))
        while len(self._marks) > 1 and at - self._marks[1][0] >= PACE_WINDOW:
            self._marks.popleft()

    def pace(self, loop: str) -> Pace:
        """Over the recent past, or from one step to the next where that takes longer."""
        if self._known is None:
            at, step = self._marks[0]
            seconds = self._at - at
            per_second = (self._step - step) / seconds if seconds > 0 else 0.0
            error = self._error(per_second)
            self._known = Pace(self._step, per_second, self._at, seconds, error, loop)
        return self._known

    def _error(self, per_second: float) -> float:
        """How far the pace may be off by chance: what the steps between two marks tell of it."""
        count = len(self._marks) - 1
        if count < FEWEST or per_second <= 0:
            return math.inf
        squares = sum(
            (at - before - (step - from_step) / per_second) ** 2
            for (before, from_step), (at, step) in pairwise(self._marks)
        )
        seconds = self._marks[-1][0] - self._marks[0][0]
        return math.sqrt(squares * count / (count - 1)) / seconds if seconds > 0 else math.inf
