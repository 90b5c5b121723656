"""Match the collectives of all ranks: which rank waited how long for which other, and where. Pure.

A rank waits from its arrival at a collective until the last rank arrives. If it goes on to the next
collective before that, it did not wait, but only sent its data.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

from nbddp.record.collectives.collective_history import (
    Arrival,
    CollectiveHistory,
    MatchedCollective,
    Place,
    RankTrack,
    chunks,
    main_place,
)
from nbddp.record.collectives.stragglers import StragglerLag, WaitWindow
from nbddp.wire.collective import Collective
from nbddp.wire.collective_arrivals import CollectiveArrivals

MAX_KEPT_ARRIVALS = 60_000  # in the matched collectives; earlier ones are only in the sums
MIN_KEPT_COLLECTIVES = 500  # matched collectives that are kept in any case
MAX_GROUPS = 64  # groups of ranks
MAX_OPEN = 1000  # collectives that some ranks have not reported
MAX_OPEN_ARRIVALS = 60_000  # small groups keep more: a rank may report seconds after the others
MIN_LOADING_SHARE = 0.5  # of the waiting, for a straggler that waits for data


class GroupMatcher:
    """Matches the collectives of one group by the number that each of its ranks counts."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = frozenset(ranks)
        self.window = WaitWindow(self.ranks)
        self._matched_at = self._reported_at = 0.0  # by ``time.monotonic()``
        self._open: dict[int, dict[int, Arrival]] = {}  # by number of the collective, and rank
        self._matched = 0
        self._newest = 0.0  # time of the newest matched collective

    def add(self, rank: int, arrival: Arrival, now: float) -> list[MatchedCollective]:
        """Add the arrival of a rank, at a ``time.monotonic()``. Return new matches."""
        self._reported_at, number = now, arrival.call.number
        if number <= self._matched or rank not in self.ranks:
            return []
        arrivals = self._open.setdefault(number, {})
        arrivals[rank] = arrival
        if len(self._open) > max(MAX_OPEN, MAX_OPEN_ARRIVALS // len(self.ranks)):
            del self._open[next(iter(self._open))]
        if len(arrivals) == len(self.ranks):
            self._matched_at = now
            return [*self._match(number - 1), *self._match(number)]
        return []

    def stragglers(self) -> dict[int, StragglerLag] | None:
        """See :meth:`WaitWindow.stragglers`."""
        return self.window.stragglers(self._reported_at - self._matched_at)

    def _match(self, number: int) -> Iterator[MatchedCollective]:
        """Match a collective once all ranks have reported it and their next collective."""
        arrivals, following = self._open.get(number, {}), self._open.get(number + 1, {})
        if {len(arrivals), len(following)} != {len(self.ranks)}:
            return
        times = {rank: arrival.at for rank, arrival in arrivals.items()}
        last_rank = max(times, key=times.__getitem__)
        last, call = times[last_rank], arrivals[last_rank].call
        waits = {
            rank: last - at if following[rank].at >= last else 0.0
            for rank, at in times.items()
            if arrivals[rank].waits_for_all
        }
        if self._newest and number == self._matched + 1:
            self.window.add(last, max(0.0, last - self._newest), waits)
        self._newest, self._matched = last, number
        for old in [old for old in self._open if old <= number]:
            del self._open[old]
        yield MatchedCollective(call, times, waits, last_rank)


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank for which the others wait.

    Attributes:
        share: fraction of the last ``seconds`` in which they wait for it.
        seconds: the time in which that was measured.
        steps: number of steps in that time; 0 if none were reported.
        title: the kind of collective in which they wait most.
        numbers: first and last number of the collectives of that kind, counted by the group.
        place: the line at which the rank was then; None if unknown.
        is_loading: whether it waits for data there.
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
    """Matches the collectives that ranks report. One thread adds; any thread may read."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.reset_for_cell(())

    def reset_for_cell(self, ranks: Iterable[int], cell: int = 0) -> None:
        """Start a cell on these ranks. Without a number, the first report sets it."""
        with self._lock:
            numbers = tuple(ranks)
            most = max(MIN_KEPT_COLLECTIVES, MAX_KEPT_ARRIVALS // max(1, len(numbers)))
            tracks = {rank: RankTrack() for rank in numbers}
            self._history = CollectiveHistory(cell, numbers, deque(maxlen=most), tracks)
            self._groups: dict[tuple[str, int], GroupMatcher] = {}

    def add(
        self,
        rank: int,
        message: CollectiveArrivals,
        now: float,
        *,
        ahead: float = 0.0,
        error: float = 0.0,
    ) -> None:
        """Add a report of a rank.

        ``now`` is ``time.monotonic()``. ``ahead`` is the number of seconds that the rank's clock is
        ahead of this machine's, with an error of ``error``.
        """
        with self._lock:
            history = self._history
            history.cell = history.cell or message.cell
            if message.cell != history.cell or rank not in history.tracks:
                return
            history.lost += message.lost
            history.thinned += message.omitted
            history.add_gpu_times(rank, message)
            base, track = message.base - ahead, history.tracks[rank]
            track.extend(message, base, error)
            for number, microseconds, kind in chunks(message.rows, 3):
                name, shape, group, waits_for_all, turn = message.kinds[kind]
                call, at = Collective(name, number, group, shape), base + microseconds / 1e6
                history.newest[group, turn, rank] = number
                track.last_arrival = Arrival(at, call, turn, bool(waits_for_all))
                self._add_arrival(rank, track.last_arrival, now)
            if message.is_over:
                self._end_rank(rank, base + message.sent_at / 1e6, now)

    def add_step(self, rank: int, at: float, step: float | None) -> None:
        """Add a step that a rank reported, at its ``time.time()``."""
        with self._lock:
            if step is not None and rank in self._history.tracks:
                self._history.tracks[rank].steps.append((at, step))

    def _end_rank(self, rank: int, at: float, now: float) -> None:
        """End the cell on this rank: it goes on to no other collective."""
        self._history.tracks[rank].is_over = True
        for group, turn in self._groups:
            if (newest := self._history.newest.get((group, turn, rank))) is not None:
                nothing = Collective("", newest + 1, group)
                self._add_arrival(rank, Arrival(at, nothing, turn, waits_for_all=False), now)

    def _add_arrival(self, rank: int, arrival: Arrival, now: float) -> None:
        key = arrival.call.group, arrival.turn
        if key not in self._groups:
            ranks = self._history.ranks_in(arrival.call.group)
            is_known = bool(ranks) and set(ranks) <= set(self._history.ranks)
            if len(self._groups) >= MAX_GROUPS or not is_known:
                return
            self._groups[key] = GroupMatcher(ranks)
        for match in self._groups[key].add(rank, arrival, now):
            self._add_match(match)

    def _add_match(self, match: MatchedCollective) -> None:
        history, last_rank = self._history, match.last_rank
        history.count += 1
        waiting = [rank for rank, seconds in match.wait_seconds.items() if seconds]
        for rank in waiting:
            history.waits[rank, last_rank] += match.wait_seconds[rank]
        if waiting:
            first, track = min(match.arrivals[rank] for rank in waiting), history.tracks[last_rank]
            loading_share = track.loading_seconds(first, match.at) / (match.at - first)
            match = replace(
                match,
                places=track.count_places(first, match.at),
                loading=loading_share * match.total_wait,
            )
        history.matched.append(match)

    # ---- results

    @property
    def cell(self) -> int:
        """The number of the current or last cell."""
        return self._history.cell

    def history(self) -> CollectiveHistory:
        """Return a copy of the collective history of the last cell."""
        with self._lock:
            return self._history.copy()

    def stragglers(self) -> dict[int, StragglerLag] | None:
        """Return the ranks for which the others wait; None if they have no common collectives."""
        with self._lock:
            group = next((self._groups[key] for key in reversed(self._groups) if not key[0]), None)
            if group is None:
                return None
            tracks = self._history.tracks
            sure = group.stragglers()
            steady = group.window.steady_stragglers(
                lambda rank, began, ended: tracks[rank].starved_share(began, ended)
            )
            return {**steady, **sure} if sure is not None else steady or None

    def straggler(self) -> Straggler | None:
        """Return the rank for which the others wait most, with details; None if there is none."""
        with self._lock:
            if not (lags := self.stragglers()):
                return None
            rank = max(lags, key=lambda it: lags[it].share)
            return _straggler(rank, lags[rank], self._history)


def _straggler(rank: int, lag: StragglerLag, history: CollectiveHistory) -> Straggler | None:
    newest_first = (each for each in reversed(history.matched) if not each.call.group)
    newest = next(newest_first, None)
    if newest is None:
        return None
    end, began = newest.at, newest.at - lag.seconds
    recent = [newest, *takewhile(lambda collective: collective.at >= began, newest_first)]
    waited_for = [collective for collective in recent if collective.last_rank == rank]
    titles = defaultdict[str, float](float)
    places: Counter[Place] = Counter()
    for collective in waited_for:
        titles[collective.call.kind] += collective.total_wait
        places.update(collective.places)
    waited = sum(titles.values())
    title = max(titles, key=titles.__getitem__, default="")
    numbers = [collective.call.number for collective in waited_for if collective.call.kind == title]
    return Straggler(
        rank=rank,
        share=lag.share,
        seconds=lag.seconds,
        steps=len({step for at, step in history.tracks[rank].steps if began <= at <= end}),
        title=title,
        place=main_place(places),
        is_loading=waited > 0
        and sum(collective.loading for collective in waited_for) > MIN_LOADING_SHARE * waited,
        numbers=(min(numbers), max(numbers)) if numbers else None,
    )
