"""Who waited how long for whom, and at which line that one was. Pure.

What ranks tell of their collectives is put together here: by group, and by the number that each
group counts. A rank waits from when it comes until the last one does.
"""

from __future__ import annotations

import ast
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from nbddp.record.durations import Durations
from nbddp.record.lags import Lag
from nbddp.record.meetings import Meetings
from nbddp.record.tracks import Last, Met, Place, Track
from nbddp.wire.timing_messages import Arrivals

KEPT = 60_000  # arrivals that are kept; of all that came before, only the sums are
FEWEST_KEPT = 500  # meetings that are kept, however many ranks there are
MOST_GROUPS = 64  # of ranks, whose collectives are matched
LOADING = 0.5  # of the waiting: from there on it is for data that the awaited rank waits


@dataclass(slots=True)
class Told:
    """All that is kept of a cell: the last meetings, and sums over all of it.

    Attributes:
        waits: seconds that a rank waited for another, by waiter and awaited.
        durations: what NCCL has measured.
        met: how many collectives all ranks came to; ``lost`` and ``thinned`` are those of all ranks
            that are not among them.
        newest: the number of the last collective of a group, by group, turn and rank.
    """

    cell: int = 0
    ranks: tuple[int, ...] = ()
    meetings: deque[Met] = field(default_factory=deque)
    tracks: dict[int, Track] = field(default_factory=dict)
    waits: Counter[tuple[int, int]] = field(default_factory=Counter)
    durations: Durations = field(default_factory=Durations)
    met: int = 0
    lost: int = 0
    thinned: int = 0
    newest: dict[tuple[str, int, int], int] = field(default_factory=dict)

    @property
    def began(self) -> float:
        """When the first rank told of the cell's begin, in seconds of ``time.time()``; else 0."""
        return min((each.began for each in self.tracks.values() if each.began), default=0.0)


@dataclass(frozen=True, slots=True)
class Awaited:
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


class Waiting:
    """Matches what ranks tell; fed on one thread, read from any."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.begin_cell(())

    def begin_cell(self, ranks: Iterable[int], cell: int = 0) -> None:
        """A cell begins on these ranks; without its number, it is the first one that is told of."""
        with self._lock:
            self._clear(tuple(ranks), cell)

    def _clear(self, ranks: tuple[int, ...], cell: int) -> None:
        self._told = Told(cell=cell, ranks=ranks)
        self._told.tracks = {rank: Track() for rank in ranks}
        most = max(FEWEST_KEPT, KEPT // max(1, len(ranks)))
        self._told.meetings = deque(maxlen=most)
        self._groups: dict[tuple[str, int], Meetings] = {}
        self._kinds: dict[tuple[str, int, int], tuple[str, str]] = {}

    def note(
        self, rank: int, letter: Arrivals, now: float, *, ahead: float = 0.0, error: float = 0.0
    ) -> None:
        """A rank has told when it came.

        ``now`` is ``time.monotonic()``, ``ahead`` the seconds that the rank's clock is ahead of
        this machine's, give or take ``error``.
        """
        with self._lock:
            self._told.cell = self._told.cell or letter.cell
            if letter.cell != self._told.cell or rank not in self._told.ranks:
                return
            self._told.lost += letter.lost
            self._told.thinned += letter.thinned
            self._told.durations.note(rank, letter)
            self._take_way(rank, letter, letter.base - ahead, error)
            self._take_rows(rank, letter, letter.base - ahead, now)

    def mark(self, rank: int, at: float, step: float | None) -> None:
        """A rank has reported a step, at its ``time.time()``."""
        with self._lock:
            if step is not None and rank in self._told.tracks:
                self._told.tracks[rank].steps.append((at, step))

    def _take_way(self, rank: int, letter: Arrivals, base: float, error: float) -> None:
        track = self._told.tracks[rank]
        track.began, track.error = base, error
        track.note_told(base + letter.until / 1e6, (letter.awake - letter.cpu) / 1e6)
        places = [(int(line), str(file)) for line, file in letter.places]
        it = iter(letter.samples)
        track.samples.extend(
            (base + at / 1e6, places[place]) for at, place in zip(it, it, strict=True)
        )
        it = iter(letter.loads)
        track.loads.extend(
            (base + began / 1e6, base + at / 1e6) for began, at in zip(it, it, strict=True)
        )

    def _take_rows(self, rank: int, letter: Arrivals, base: float, now: float) -> None:
        came: dict[tuple[str, int], list[tuple[int, float, bool]]] = {}
        it = iter(letter.rows)
        for number, at, kind in zip(it, it, it, strict=True):
            name, shape, group, meets, turn = letter.kinds[kind]
            self._kinds.setdefault((group, turn, number), (name, shape))
            self._told.newest[group, turn, rank] = number
            came.setdefault((group, turn), []).append((number, base + at / 1e6, bool(meets)))
        if letter.rows:
            number, at, kind = letter.rows[-3:]
            name, shape, group, meets, turn = letter.kinds[kind]
            last = Last(base + at / 1e6, group, turn, number, name, shape, bool(meets))
            self._told.tracks[rank].last = last
        for key, rows in came.items():
            if (meetings := self._meetings(key)) is not None:
                meetings.note(rank, letter.cell, rows, now)
        if letter.is_over:
            self._end(rank, letter, base + letter.until / 1e6, now)

    def _end(self, rank: int, letter: Arrivals, at: float, now: float) -> None:
        """Its last collective is over, as the cell is: what comes next is nothing."""
        self._told.tracks[rank].is_over = True
        for (group, turn), meetings in self._groups.items():
            newest = self._told.newest.get((group, turn, rank))
            if newest is not None:
                meetings.note(rank, letter.cell, [(newest + 1, at, False)], now)

    def _meetings(self, key: tuple[str, int]) -> Meetings | None:
        """Those of a group; None of one whose ranks are not known."""
        if key not in self._groups:
            ranks = ranks_of(key[0]) if key[0] else self._told.ranks
            if len(self._groups) >= MOST_GROUPS or not ranks or not set(ranks) <= self._known():
                return None
            self._groups[key] = Meetings(on_met=partial(self._meet, key))
            self._groups[key].begin_cell(ranks)
        return self._groups[key]

    def _known(self) -> set[int]:
        return set(self._told.ranks)

    def _meet(
        self,
        key: tuple[str, int],
        number: int,
        came: Mapping[int, float],
        waits: Mapping[int, float],
    ) -> None:
        told = self._told
        name, shape = self._kinds.pop((*key, number), ("", ""))
        if len(self._kinds) > KEPT:
            self._kinds.clear()
        told.met += 1
        awaited = max(came, key=lambda rank: came[rank])
        for rank, seconds in waits.items():
            if seconds:
                told.waits[rank, awaited] += seconds  # type: ignore[assignment]
        first = min((came[rank] for rank, seconds in waits.items() if seconds), default=0.0)
        places: Counter[Place] = Counter()
        loading = 0.0
        if first:
            track = told.tracks[awaited]
            places.update(seen_at(track.samples, first, came[awaited]))
            share = _overlap(track.loads, first, came[awaited]) / (came[awaited] - first)
            loading = share * sum(waits.values())
        told.meetings.append(
            Met(key[0], number, name, shape, came, waits, awaited, places, loading)
        )

    # ---- what follows from it

    @property
    def told(self) -> Told:
        """What is kept of the last cell."""
        return self._told

    def read(self) -> Told:
        """The same, which does not change any more."""
        with self._lock:
            told = self._told
            return replace(
                told,
                meetings=deque(told.meetings),
                tracks={rank: each.copy() for rank, each in told.tracks.items()},
                waits=Counter(told.waits),
                durations=told.durations.copy(),
                newest=dict(told.newest),
            )

    def lags(self) -> dict[int, Lag] | None:
        """The ranks that the others wait for; None where they do not meet."""
        with self._lock:
            default = [each for (group, _), each in self._groups.items() if not group]
            if not default:
                return None
            lags, late = default[-1].lags(), default[-1].steadily_late(self._lacked)
            return {**late, **lags} if lags is not None else late or None

    def _lacked(self, rank: int, began: float, ended: float) -> float:
        """The share of this time in which a rank would have run and had no core."""
        return self._told.tracks[rank].lacked(began, ended)

    def awaited(self) -> Awaited | None:
        """The rank that the others wait for most, and what is known of that."""
        with self._lock:
            lags = self.lags()
            if not lags:
                return None
            rank = max(lags, key=lambda each: lags[each].share)
            return _awaited(rank, lags[rank], self._told)


def _awaited(rank: int, lag: Lag, told: Told) -> Awaited | None:
    met = _recent(told.meetings, lag.seconds)
    if not met:
        return None
    end, began = met[0].at, met[0].at - lag.seconds
    recent = [each for each in met if each.awaited == rank]
    titles: Counter[str] = Counter()
    places: Counter[Place] = Counter()
    for each in recent:
        titles[each.title] += each.waited  # type: ignore[assignment]
        places.update(each.places)
    waited = sum(each.waited for each in recent)
    title = titles.most_common(1)[0][0] if titles else ""
    numbers = [each.number for each in recent if each.title == title]
    return Awaited(
        rank=rank,
        share=lag.share,
        seconds=lag.seconds,
        steps=len({step for at, step in told.tracks[rank].steps if began <= at <= end}),
        title=title,
        place=mostly(places),
        is_loading=waited > 0 and sum(each.loading for each in recent) > LOADING * waited,
        numbers=(min(numbers), max(numbers)) if numbers else None,
    )


def _recent(meetings: deque[Met], seconds: float) -> list[Met]:
    """Those of the default group in the last so many seconds, newest first."""
    found: list[Met] = []
    for each in reversed(meetings):
        if each.group:
            continue
        if found and each.at < found[0].at - seconds:
            break
        found.append(each)
    return found


def mostly(places: Counter[Place]) -> Place | None:
    """Where it was seen in at least half of the samples; None if nowhere."""
    for place, count in places.most_common(1):
        return place if 2 * count >= places.total() else None
    return None


def ranks_of(group: str) -> tuple[int, ...]:
    """The ranks of a group by its name, as far as it says them.

    >>> ranks_of("[0, 2]"), ranks_of("'tensor parallel'")
    ((0, 2), ())
    """
    if not group.startswith("["):
        return ()
    return tuple(ast.literal_eval(group))


def seen_at(samples: Iterable[tuple[float, Place]], began: float, ended: float) -> Iterable[Place]:
    """Where a rank was seen in this time, given its samples in order."""
    for at, place in reversed(samples):  # type: ignore[call-overload]
        if at < began:
            return
        if at <= ended:
            yield place


def _overlap(spans: Iterable[tuple[float, float]], began: float, ended: float) -> float:
    """Seconds that spans, given in order, have in common with this time."""
    found = 0.0
    for start, end in reversed(spans):  # type: ignore[call-overload]
        if end < began:
            break
        found += max(0.0, min(end, ended) - max(start, began))
    return found
