"""Find the ranks that are slower than the others, not by chance. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from math import hypot, sqrt
from statistics import mean, median_low, stdev

from nbddp.record.step_rate import StepRate

MIN_LAG = 0.2  # fraction of the time; a busy machine can delay a rank by a tenth for long
MIN_Z_SCORE = 4.0  # standard errors: noise stays below this
# The window is longer than MIN_WINDOW until ENOUGH_WAITS of its seconds have a wait.
MIN_WINDOW = 20.0  # seconds
ENOUGH_WAITS = 10  # seconds with a wait
MAX_WINDOW = 120.0  # seconds
MIN_SECONDS = 10.0  # minimum total time between collectives, for a result
MIN_WAITS = 8  # minimum seconds with a wait, for a result
MAX_IDLE = 10.0  # seconds since the last collective, or three times the usual interval
# A rank that is late in each of the last parts is reported before MIN_SECONDS have passed.
PARTS_PER_SECOND = 4
STEADY_PARTS = 6
MIN_STEADY_SHARE = 0.5  # minimum lateness in a part, relative to the rank's average


@dataclass(frozen=True, slots=True)
class StragglerLag:
    """By how much a rank is slower than the others.

    Attributes:
        share: fraction of their time that the other ranks spend waiting for this rank. If the ranks
            have no common collectives: the fraction by which its step rate is lower.
        seconds: length of the measurement.
        is_waited_for: whether ``share`` is waiting time, not a lower step rate.
    """

    share: float
    seconds: float
    is_waited_for: bool = True


StarvedShare = Callable[[int, float, float], float]


@dataclass(slots=True)
class _Period:
    """The collectives of a second, or of a part of a second.

    The samples are times, not steps: a busy machine that delays one step also delays the next.

    Attributes:
        seconds: total time from each collective to the next.
        late: seconds by which each rank was later than half of the others.
    """

    number: int
    count: int = 0
    seconds: float = 0.0
    has_waited: bool = False
    late: Counter[int] = field(default_factory=Counter)

    def add(self, count: int, seconds: float, late: Mapping[int, float]) -> None:
        self.count += count
        self.seconds += seconds
        self.has_waited = self.has_waited or any(late.values())
        self.late.update(late)


class WaitWindow:
    """How long the ranks of a group waited for each rank in the recent past."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._ranks = sorted(ranks)
        self._parts: deque[_Period] = deque()
        self._newest = 0.0

    def add(self, at: float, seconds: float, waits: Mapping[int, float]) -> None:
        """Add a matched collective: its time, the time since the previous one, and its waits."""
        number = int(at * PARTS_PER_SECOND)
        if not self._parts or self._parts[-1].number != number:
            self._parts.append(_Period(number))
        late = _lateness(waits)
        self._parts[-1].add(bool(late), seconds, late)
        while self._parts[0].number < number - MAX_WINDOW * PARTS_PER_SECOND:
            self._parts.popleft()
        self._newest = at

    def stragglers(self, seconds_since: float) -> dict[int, StragglerLag] | None:
        """Return the ranks for which the others wait; None if they have no common collectives.

        Args:
            seconds_since: time from the last matched collective to the last report of a rank.
        """
        periods = self._recent_seconds()
        count = sum(period.count for period in periods)
        seconds = sum(period.seconds for period in periods)
        if not count or seconds < MIN_SECONDS or seconds_since > max(MAX_IDLE, 3 * seconds / count):
            return None
        lags = {}
        for rank in self._ranks:
            late = [period.late[rank] for period in periods if period.has_waited]
            if sum(late) < MIN_LAG * seconds or len(late) < MIN_WAITS:
                continue
            if mean(late) > MIN_Z_SCORE * stdev(late) / sqrt(len(late)):
                lags[rank] = StragglerLag(min(1.0, sum(late) / seconds), seconds)
        return lags

    def _recent_seconds(self) -> list[_Period]:
        periods: list[_Period] = []
        newest_first = reversed(self._parts)
        for second, parts in groupby(newest_first, lambda part: part.number // PARTS_PER_SECOND):
            waited = sum(period.has_waited for period in periods)
            if waited >= ENOUGH_WAITS and sum(period.seconds for period in periods) >= MIN_WINDOW:
                break
            periods.append(_Period(second))
            for part in parts:
                periods[-1].add(part.count, part.seconds, part.late)
        return periods

    def steady_stragglers(self, starved_share: StarvedShare) -> dict[int, StragglerLag]:
        """Return the rank for which the others waited in each of the last parts, if there is one.

        A second and a half are enough for that. A busy machine delays one rank after another, but
        sometimes the same rank for seconds.

        Args:
            starved_share: the fraction of a time in which a rank was ready to run and had no core.
                The machine may cause that part of its lag, even if the others lacked a core too.
        """
        parts = list(self._parts)[-STEADY_PARTS - 1 : -1]  # the last part is not over
        if not parts or parts[-1].number - parts[0].number > 2 * STEADY_PARTS:
            return {}  # so few collectives that each part has one
        seconds = sum(part.seconds for part in parts)
        if not seconds or not all(part.has_waited for part in parts) or len(parts) < STEADY_PARTS:
            return {}
        lags = {}
        for rank in self._ranks:
            share = sum(part.late[rank] for part in parts) / seconds
            is_steady = all(
                part.late[rank] >= MIN_STEADY_SHARE * share * part.seconds for part in parts
            )
            if share < MIN_LAG or not is_steady:
                continue
            if share - starved_share(rank, self._newest - seconds, self._newest) >= MIN_LAG:
                lags[rank] = StragglerLag(min(1.0, share), seconds)
        return lags


def _lateness(waits: Mapping[int, float]) -> dict[int, float]:
    """Return how many seconds longer at least half of the others waited than each rank."""
    if len(waits) < 2:
        return {}
    ordered = sorted(waits, key=lambda rank: waits[rank])
    values = [waits[rank] for rank in ordered]
    middle = (len(values) - 2) // 2  # the lower median of the others
    return {
        rank: values[middle + (middle >= place)] - waits[rank] for place, rank in enumerate(ordered)
    }


def slow_by_step_rate(rates: Mapping[int, StepRate]) -> dict[int, StragglerLag]:
    """Return the ranks that make fewer steps than most other ranks in the same loop."""
    lags = {}
    for rank, rate in rates.items():
        others = [other for it, other in rates.items() if it != rank and other.loop == rate.loop]
        typical = median_low(other.per_second for other in others) if others else 0.0
        if typical <= 0:
            continue
        share = 1 - rate.per_second / typical
        error = hypot(rate.error, median_low(other.error for other in others))
        if share >= MIN_LAG and share > MIN_Z_SCORE * error:
            lags[rank] = StragglerLag(share, rate.seconds, is_waited_for=False)
    return lags
