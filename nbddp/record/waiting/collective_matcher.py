"""Match the collectives of all ranks: who waited how long for whom, and at which line. Pure.

A rank waits from when it comes to a collective until the last rank does, if it did not go on to the
next collective before that: then it has only handed over its part.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from nbddp.record.waiting.collective_history import (
    Arrival,
    CollectiveHistory,
    MatchedCollective,
    Place,
    RankTrack,
    chunks,
    main_place,
)
from nbddp.record.waiting.stragglers import StragglerLag, WaitWindow
from nbddp.wire.collective import Collective
from nbddp.wire.timing_messages import Arrivals

MAX_ARRIVALS = 60_000  # that are kept as matched collectives; of earlier ones only the sums are,
MIN_MATCHED = 500  # but so many collectives in any case
MAX_GROUPS = 64  # of ranks, whose collectives are matched
MAX_OPEN = 1000  # collectives that not all ranks have reported: so many in any case, and
MAX_OPEN_ARRIVALS = 60_000  # of few ranks more: one may report seconds after the others
LOADING = 0.5  # of the waiting: from there on it is for data that the awaited rank waits


@dataclass(slots=True)
class _Open:
    """A collective that not all ranks have reported."""

    call: Collective
    meets: bool
    came: dict[int, float] = field(default_factory=dict)


class _Match(NamedTuple):
    """A collective that all ranks came to, and the seconds that each of them waited."""

    collective: _Open
    waits: dict[int, float]


class GroupMatcher:
    """The collectives of one group, matched by the number that each of its ranks counts."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = frozenset(ranks)
        self.window = WaitWindow(self.ranks)
        self._open: dict[int, _Open] = {}
        self._matched = 0
        self._newest = 0.0  # when the newest matched collective was
        self._met_at = self._heard_at = 0.0

    def add(
        self, rank: int, call: Collective, at: float, now: float, *, meets: bool
    ) -> list[_Match]:
        """Add that a rank came at a ``time.time()``, and return what is matched now.

        ``meets``: whether no rank is through before all are there; ``now`` is ``time.monotonic()``.
        """
        self._heard_at, number = now, call.number
        if number <= self._matched or rank not in self.ranks:
            return []
        came = self._open.setdefault(number, _Open(call, meets)).came
        came[rank] = at
        if len(self._open) > max(MAX_OPEN, MAX_OPEN_ARRIVALS // len(self.ranks)):
            del self._open[next(iter(self._open))]
        if len(came) == len(self.ranks):
            self._met_at = now
            return [*self._match(number - 1), *self._match(number)]
        return []

    def stragglers(self) -> dict[int, StragglerLag] | None:
        """See :meth:`WaitWindow.stragglers`."""
        return self.window.stragglers(self._heard_at - self._met_at)

    def _match(self, number: int) -> Iterator[_Match]:
        """Match a collective once all ranks have reported it and the one that they called next."""
        found, following = self._open.get(number), self._open.get(number + 1)
        if found is None or following is None:
            return
        if not len(found.came) == len(following.came) == len(self.ranks):
            return
        last = max(found.came.values())
        waits = {
            rank: last - at if following.came[rank] >= last else 0.0
            for rank, at in found.came.items()
            if found.meets
        }
        if self._newest and number == self._matched + 1:
            self.window.add(last, max(0.0, last - self._newest), waits)
        self._newest, self._matched = last, number
        for each in [each for each in self._open if each <= number]:
            del self._open[each]
        yield _Match(found, waits)


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others wait for.

    Attributes:
        share: of the last ``seconds`` that they do, and there were so many ``steps`` in them, 0 if
            none were reported.
        title: the kind of collective before which they wait most.
        numbers: the first and the last of that kind that they waited for, in the group's count.
        place: the line where it was then, None where that is not known.
        is_loading: whether it then waits for data.
    """

    rank: int
    share: float
    seconds: float
    steps: int = 0
    title: str = ""
    place: Place | None = None
    is_loading: bool = False
    numbers: tuple[int, int] | None = None


class CollectiveMatcher:
    """Matches the collectives that ranks report; fed on one thread, read from any."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.begin_cell(())

    def begin_cell(self, ranks: Iterable[int], cell: int = 0) -> None:
        """Begin a cell on these ranks; without its number it is the first that ranks report of."""
        with self._lock:
            known = tuple(ranks)
            matched = max(MIN_MATCHED, MAX_ARRIVALS // max(1, len(known)))
            self._history = CollectiveHistory(
                cell=cell,
                ranks=known,
                matched=deque(maxlen=matched),
                tracks={rank: RankTrack() for rank in known},
            )
            self._groups: dict[tuple[str, int], GroupMatcher] = {}

    def add(
        self, rank: int, message: Arrivals, now: float, *, ahead: float = 0.0, error: float = 0.0
    ) -> None:
        """Add what a rank reported.

        ``now`` is ``time.monotonic()``, ``ahead`` the seconds that the rank's clock is ahead of
        this machine's, give or take ``error``.
        """
        with self._lock:
            history = self._history
            history.cell = history.cell or message.cell
            if message.cell != history.cell or rank not in history.tracks:
                return
            history.lost += message.lost
            history.thinned += message.thinned
            history.add_gpu_times(rank, message)
            base = message.base - ahead
            history.tracks[rank].extend(message, base, error)
            self._add_arrivals(rank, message, base, now)
            if message.is_over:
                self._end(rank, base + message.until / 1e6, now)

    def add_step(self, rank: int, at: float, step: float | None) -> None:
        """Add that a rank has reported a step, at its ``time.time()``."""
        with self._lock:
            if step is not None and rank in self._history.tracks:
                self._history.tracks[rank].steps.append((at, step))

    def _add_arrivals(self, rank: int, message: Arrivals, base: float, now: float) -> None:
        for number, microseconds, kind in chunks(message.rows, 3):
            name, shape, group, meets, turn = message.kinds[kind]
            call, at = Collective(name, number, group, shape), base + microseconds / 1e6
            self._history.newest[group, turn, rank] = number
            self._arrive(rank, Arrival(at, call, turn, bool(meets)), now)
        if message.rows:
            self._history.tracks[rank].last = Arrival(at, call, turn, bool(meets))

    def _end(self, rank: int, at: float, now: float) -> None:
        """The cell is over on this rank: it did not go on to another collective before."""
        self._history.tracks[rank].is_over = True
        for group, turn in self._groups:
            if (newest := self._history.newest.get((group, turn, rank))) is not None:
                nothing = Collective("", newest + 1, group)
                self._arrive(rank, Arrival(at, nothing, turn, meets=False), now)

    def _arrive(self, rank: int, arrival: Arrival, now: float) -> None:
        call, group = arrival.call, self._group(arrival.call.group, arrival.turn)
        if group is None:
            return
        for match in group.add(rank, call, arrival.at, now, meets=arrival.meets):
            self._keep(match)

    def _group(self, group: str, turn: int) -> GroupMatcher | None:
        """Return a group; None where its ranks are not known."""
        key = group, turn
        if key not in self._groups:
            ranks = self._history.ranks_in(group)
            if len(self._groups) >= MAX_GROUPS or not ranks:
                return None
            if not set(ranks) <= set(self._history.ranks):
                return None
            self._groups[key] = GroupMatcher(ranks)
        return self._groups[key]

    def _keep(self, match: _Match) -> None:
        history, found, waits = self._history, match.collective, match.waits
        came = found.came
        history.count += 1
        awaited = max(came, key=lambda rank: came[rank])
        waiting = {rank: seconds for rank, seconds in waits.items() if seconds}
        for rank, seconds in waiting.items():
            history.waits[rank, awaited] += seconds  # type: ignore[assignment]
        places: Counter[Place] = Counter()
        loading = 0.0
        if waiting:
            first, last = min(came[rank] for rank in waiting), came[awaited]
            track = history.tracks[awaited]
            places = track.seen_at(first, last)
            loading = track.loading(first, last) / (last - first) * sum(waits.values())
        history.matched.append(MatchedCollective(found.call, came, waits, awaited, places, loading))

    # ---- what follows from it

    @property
    def cell(self) -> int:
        """The cell that is matched, or was last."""
        return self._history.cell

    def history(self) -> CollectiveHistory:
        """Return what is kept of the last cell; it does not change any more."""
        with self._lock:
            return self._history.copy()

    def stragglers(self) -> dict[int, StragglerLag] | None:
        """Return the ranks that the others wait for; None where they do not meet."""
        with self._lock:
            group = next((self._groups[key] for key in reversed(self._groups) if not key[0]), None)
            if group is None:
                return None
            sure = group.stragglers()
            steady = group.window.steady_stragglers(self._starved_share)
            return {**steady, **sure} if sure is not None else steady or None

    def _starved_share(self, rank: int, began: float, ended: float) -> float:
        return self._history.tracks[rank].starved_share(began, ended)

    def straggler(self) -> Straggler | None:
        """Return the rank that the others wait for most, with what is known of it."""
        with self._lock:
            if not (lags := self.stragglers()):
                return None
            rank = max(lags, key=lambda each: lags[each].share)
            return _straggler(rank, lags[rank], self._history)


def _straggler(rank: int, lag: StragglerLag, history: CollectiveHistory) -> Straggler | None:
    recent = _recent(history.matched, lag.seconds)
    if not recent:
        return None
    end, began = recent[0].at, recent[0].at - lag.seconds
    awaited = [each for each in recent if each.awaited == rank]
    titles: Counter[str] = Counter()
    places: Counter[Place] = Counter()
    for each in awaited:
        titles[each.call.kind] += each.waited  # type: ignore[assignment]
        places.update(each.places)
    waited = sum(each.waited for each in awaited)
    title = titles.most_common(1)[0][0] if titles else ""
    numbers = [each.call.number for each in awaited if each.call.kind == title]
    return Straggler(
        rank=rank,
        share=lag.share,
        seconds=lag.seconds,
        steps=len({step for at, step in history.tracks[rank].steps if began <= at <= end}),
        title=title,
        place=main_place(places),
        is_loading=waited > 0 and sum(each.loading for each in awaited) > LOADING * waited,
        numbers=(min(numbers), max(numbers)) if numbers else None,
    )


def _recent(matched: deque[MatchedCollective], seconds: float) -> list[MatchedCollective]:
    """Return those of the default group in the last so many seconds, newest first."""
    found: list[MatchedCollective] = []
    for each in reversed(matched):
        if each.call.group:
            continue
        if found and each.at < found[0].at - seconds:
            break
        found.append(each)
    return found
