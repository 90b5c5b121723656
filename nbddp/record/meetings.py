"""Who is waited for: when each rank came to the collectives that all of them meet in. Pure."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import mean, stdev
from typing import Any

from nbddp.record.lags import MARGIN, SURE, Lag

WINDOW = 20.0  # seconds that are the recent past, if ranks met in enough of them
ENOUGH = 10  # seconds with a meeting; where they are rare, the recent past is longer,
LONGEST = 120.0  # up to so many seconds
SHORTEST = 10.0  # seconds that say something,
FEWEST = 8  # and in so many of them ranks met
STALE = 10.0  # seconds without a meeting, or three times as long as one takes, that make old news
MAX_OPEN = 1000  # meetings that not all ranks have told of: so many in any case, and
MAX_TOLD = 60_000  # of few ranks as many more as they tell of together: one may be seconds behind
PART = 0.25  # seconds; where a rank is late in each such part,
PARTS = 6  # of the last few,
STEADY = 0.5  # by so much of what it is late on average, it is told before the seconds tell


@dataclass(slots=True)
class _Second:
    """The meetings of one second: how long they took, and how long each rank was waited for.

    What a busy machine does to one step, it does to the next, too: seconds are the samples.
    """

    second: int
    count: int = 0
    seconds: float = 0.0
    has_waited: bool = False
    total: dict[int, float] = field(default_factory=dict)

    def add(self, seconds: float, gaps: Mapping[int, float]) -> None:
        """A meeting, and the time since the one before."""
        self.count += bool(gaps)
        self.has_waited = self.has_waited or any(gaps.values())
        self.seconds += seconds
        for rank, gap in gaps.items():
            self.total[rank] = self.total.get(rank, 0.0) + gap


Lacked = Callable[[int, float, float], float]
OnMet = Callable[[int, Mapping[int, float], Mapping[int, float]], None]


class Meetings:
    """Keeps who waited how long for whom, in the recent past; fed on one thread, read from any.

    A rank waits from when it comes until the last one does, if it did not go on to the next call
    before that: then it has only handed over its part. Times are by one clock.

    Args:
        on_met: told of each meeting: its number, when each rank came, and how long it waited.
    """

    def __init__(self, on_met: OnMet = lambda _number, _came, _waits: None) -> None:
        self._lock = threading.Lock()
        self._on_met = on_met
        self._ranks: frozenset[int] = frozenset()
        self._clear(0)

    def _clear(self, cell: int) -> None:
        self._cell = cell
        self._open: dict[int, tuple[bool, dict[int, float]]] = {}
        self._past: deque[_Second] = deque()
        self._parts: deque[_Second] = deque(maxlen=PARTS + 1)
        self._folded = 0
        self._last = 0.0  # when the meeting was that was counted in last
        self._met_at = self._seen_at = 0.0

    def begin_cell(self, ranks: Iterable[int]) -> None:
        """A cell begins on these ranks."""
        with self._lock:
            self._ranks = frozenset(ranks)
            self._clear(0)

    def note(self, rank: int, cell: int, arrivals: Sequence[Any], now: float) -> None:
        """When a rank came to collectives of a cell; see :class:`nbddp.wire.messages.Pulse`."""
        with self._lock:
            if not cell or cell < self._cell or rank not in self._ranks:
                return
            if cell > self._cell:
                self._clear(cell)
            self._seen_at = now
            for number, at, meets in arrivals:
                self._come(rank, int(number), float(at), meets=bool(meets), now=now)

    def _come(self, rank: int, number: int, at: float, *, meets: bool, now: float) -> None:
        if number <= self._folded:
            return
        came = self._open.setdefault(number, (meets, {}))[1]
        came[rank] = at
        if len(self._open) > max(MAX_OPEN, MAX_TOLD // len(self._ranks)):
            del self._open[next(iter(self._open))]
        if len(came) == len(self._ranks):
            self._met_at = now
            for each in (number - 1, number):
                self._fold(each)

    def _fold(self, number: int) -> None:
        """Count a meeting in, once all ranks have told of it and of what they called next."""
        meets, came = self._open.get(number, (False, {}))
        following = self._open.get(number + 1, (False, {}))[1]
        if not len(came) == len(following) == len(self._ranks):
            return
        before, self._last = self._last, max(came.values())
        is_next, self._folded = number == self._folded + 1, number
        for each in [each for each in self._open if each <= number]:
            del self._open[each]
        waits = _waits(came, following) if meets else {}
        self._on_met(number, came, waits)
        if before and is_next:
            self._count(self._last, max(0.0, self._last - before), _gaps(waits))

    def _count(self, at: float, seconds: float, gaps: Mapping[int, float]) -> None:
        second = int(at)
        if not self._past or self._past[-1].second != second:
            self._past.append(_Second(second))
        self._past[-1].add(seconds, gaps)
        while self._past[0].second < second - LONGEST:
            self._past.popleft()
        part = int(at / PART)
        if not self._parts or self._parts[-1].second != part:
            self._parts.append(_Second(part))
        self._parts[-1].add(seconds, gaps)

    def steadily_late(self, lacked: Lacked = lambda _rank, _began, _ended: 0.0) -> dict[int, Lag]:
        """The rank that the others waited for in each part of the last seconds, if there is one.

        It is told after a second and a half. A busy machine makes now this rank late and now
        another, but one of them for seconds at times.

        Args:
            lacked: the share of a time in which a rank would have run and had no core: so much of
                its being late may be the machine's, even where the others lacked one, too.
        """
        with self._lock:
            parts = list(self._parts)[:-1]  # the last one is not over
            if not parts or parts[-1].second - parts[0].second > 2 * PARTS:
                return {}  # they meet so seldom that each part has one meeting
            seconds = sum(each.seconds for each in parts)
            waited = [each for each in parts if each.has_waited]
            if len(waited) < PARTS or not seconds:
                return {}
            found = {}
            for rank in self._ranks:
                gaps = [(each.total.get(rank, 0.0), each.seconds) for each in waited]
                share = sum(gap for gap, _ in gaps) / seconds
                if share >= MARGIN and all(gap >= STEADY * share * of for gap, of in gaps):
                    excused = lacked(rank, self._last - seconds, self._last)
                    if share - excused >= MARGIN:
                        found[rank] = Lag(min(1.0, share), seconds)
            return found

    def lags(self) -> dict[int, Lag] | None:
        """The ranks that the others wait for; None where they do not meet."""
        with self._lock:
            past = self._recent()
            count = sum(each.count for each in past)
            seconds = sum(each.seconds for each in past)
            if not count or seconds < SHORTEST:
                return None
            if self._seen_at - self._met_at > max(STALE, 3 * seconds / count):
                return None
            gaps = {
                rank: [each.total.get(rank, 0.0) for each in past if each.has_waited]
                for rank in sorted(self._ranks)
            }
        return {
            rank: Lag(min(1.0, sum(each) / seconds), seconds)
            for rank, each in gaps.items()
            if sum(each) >= MARGIN * seconds and _is_sure(each)
        }

    def _recent(self) -> list[_Second]:
        found: list[_Second] = []
        seconds, waited = 0.0, 0
        for each in reversed(self._past):
            if seconds >= WINDOW and waited >= ENOUGH:
                break
            found.append(each)
            seconds, waited = seconds + each.seconds, waited + each.has_waited
        return found


def _is_sure(samples: Sequence[float]) -> bool:
    """Whether the mean is as many standard errors above nothing as noise is not."""
    if len(samples) < FEWEST:
        return False
    return mean(samples) > SURE * stdev(samples) / sqrt(len(samples))


def _waits(came: Mapping[int, float], following: Mapping[int, float]) -> dict[int, float]:
    """How long each rank waited for the last one, given when it came, and to the next meeting."""
    last = max(came.values())
    return {rank: last - at if following[rank] >= last else 0.0 for rank, at in came.items()}


def _gaps(waits: Mapping[int, float]) -> dict[int, float]:
    """How much longer than each rank at least half of the others waited."""
    if len(waits) < 2:
        return {}
    ordered = sorted(waits, key=lambda rank: waits[rank])
    values = [waits[rank] for rank in ordered]
    return {
        rank: _middle_without(values, place) - waits[rank] for place, rank in enumerate(ordered)
    }


def _middle_without(ordered: Sequence[float], place: int) -> float:
    """The middle one, or the lower of the two in the middle, of all but one."""
    middle = (len(ordered) - 2) // 2
    return ordered[middle + (middle >= place)]
