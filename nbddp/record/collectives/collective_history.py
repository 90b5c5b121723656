"""The collectives of a cell: matched collectives, and the reports of each rank between them."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from nbddp.wire.collective import Collective
from nbddp.wire.collective_arrivals import CollectiveArrivals

MAX_TRACK_ENTRIES = 5000  # of a rank's waits for data, its samples, and its steps
MAX_KINDS = 200  # of collectives with stored GPU times

Place = tuple[int, str]  # a line, and its script; "" for a cell
_newest = partial(deque[Any], maxlen=MAX_TRACK_ENTRIES)


def chunks(flat: Iterable[int], size: int) -> Iterator[tuple[int, ...]]:
    """Split a flat list of numbers into tuples.

    >>> list(chunks([1, 2, 3, 4], 2))
    [(1, 2), (3, 4)]
    """
    return zip(*[iter(flat)] * size, strict=True)


def main_place(places: Mapping[Place, int]) -> Place | None:
    """Return the line of at least half of the samples of a rank; None if there is none."""
    place = max(places, key=lambda seen: places[seen], default=None)
    return place if place and 2 * places[place] >= sum(places.values()) else None


@dataclass(frozen=True, slots=True)
class MatchedCollective:
    """A collective that all ranks of a group reached.

    Attributes:
        call: the collective.
        arrivals: arrival time of each rank, in seconds of ``time.time()`` on this machine.
        wait_seconds: time that each rank waited for the last one; empty if no rank waits in this
            call.
        last_rank: the rank that arrived last.
        places: number of samples of the last rank at each line while others waited.
        loading: seconds of the waiting in which the last rank itself waited for data.
    """

    call: Collective
    arrivals: Mapping[int, float]
    wait_seconds: Mapping[int, float]
    last_rank: int
    places: Mapping[Place, int] = field(default_factory=dict)
    loading: float = 0.0

    @property
    def at(self) -> float:
        """Arrival time of the last rank."""
        return self.arrivals[self.last_rank]

    @property
    def total_wait(self) -> float:
        """Seconds that all ranks waited, together."""
        return sum(self.wait_seconds.values())


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a rank arrived at a collective; other fields: see :class:`CollectiveArrivals`."""

    at: float
    call: Collective
    turn: int
    waits_for_all: bool


@dataclass(slots=True)
class RankTrack:
    """The reports of one rank about a cell, newest last.

    Attributes:
        samples: at which line the rank was, and when.
        loads: start and end of each wait for a batch of a ``DataLoader``.
        steps: when it reported which step.
        cpu_starvation: time spans, each with the seconds in which the rank was ready to run and had
            no core.
        reported_at: the time up to which it has reported.
        began: the time from which it has reported.
        error: possible error of its clock in seconds.
        is_over: whether the cell is over on this rank.
    """

    samples: deque[tuple[float, Place]] = field(default_factory=_newest)
    loads: deque[tuple[float, float]] = field(default_factory=_newest)
    steps: deque[tuple[float, float]] = field(default_factory=_newest)
    cpu_starvation: deque[tuple[float, float, float]] = field(
        default_factory=lambda: deque(maxlen=100)
    )
    began: float = 0.0
    reported_at: float = 0.0
    error: float = 0.0
    last_arrival: Arrival | None = None
    is_over: bool = False

    def copy(self) -> RankTrack:
        """Return an independent copy."""
        lists = ("samples", "loads", "steps", "cpu_starvation")
        return replace(self, **{name: copy(getattr(self, name)) for name in lists})

    def extend(self, message: CollectiveArrivals, base: float, error: float) -> None:
        """Add a report; ``base`` is the start of its times, on this machine's clock."""
        self.began, self.error = base, error
        at, since = base + message.sent_at / 1e6, max(base, self.reported_at)
        if at > since:
            starved = max(0.0, (message.awake_time - message.cpu_time) / 1e6)
            self.cpu_starvation.append((since, at, starved))
            self.reported_at = at
        places = [(int(line), str(file)) for line, file in message.cell_lines]
        samples, waits = chunks(message.samples, 2), chunks(message.batch_waits, 2)
        self.samples.extend((base + at / 1e6, places[place]) for at, place in samples)
        self.loads.extend((base + began / 1e6, base + ended / 1e6) for began, ended in waits)

    def starved_share(self, began: float, ended: float) -> float:
        """Return the fraction of this time in which the rank was ready to run and had no core."""
        starved = total = 0.0
        for start, end, seconds in self.cpu_starvation:
            part = max(0.0, min(end, ended) - max(start, began))
            total += part
            starved += part * seconds / (end - start)
        return starved / total if total else 0.0

    def count_places(self, began: float, ended: float) -> Counter[Place]:
        """Count the samples at each line in this time."""
        counts: Counter[Place] = Counter()
        for at, place in reversed(self.samples):
            if at < began:
                break
            if at <= ended:
                counts[place] += 1
        return counts

    def loading_seconds(self, began: float, ended: float) -> float:
        """Return the seconds of this time in which the rank waited for data."""
        seconds = 0.0
        for start, end in reversed(self.loads):
            if end < began:
                break
            seconds += max(0.0, min(end, ended) - max(start, began))
        return seconds


@dataclass(slots=True)
class CollectiveHistory:
    """The collective history of a cell: its last matched collectives, and sums over the whole cell.

    Attributes:
        waits: seconds that a rank waited for another, by waiting rank and last rank.
        gpu_times: for each kind of collective and rank, how many NCCL measured, and their seconds.
        count: number of matched collectives.
        lost: number of unread collectives, of all ranks.
        thinned: number of omitted collectives, of all ranks.
        newest: number of the last collective of a group, by group, turn and rank.
    """

    cell: int = 0
    ranks: tuple[int, ...] = ()
    matched: deque[MatchedCollective] = field(default_factory=deque)
    tracks: dict[int, RankTrack] = field(default_factory=dict)
    waits: defaultdict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    gpu_times: dict[str, dict[int, tuple[int, float]]] = field(default_factory=dict)
    count: int = 0
    lost: int = 0
    thinned: int = 0
    newest: dict[tuple[str, int, int], int] = field(default_factory=dict)

    @property
    def began(self) -> float:
        """Earliest start of the cell on a rank, in seconds of ``time.time()``; 0 if unknown."""
        return min((track.began for track in self.tracks.values() if track.began), default=0.0)

    def ranks_in(self, group: str) -> tuple[int, ...]:
        """Return the ranks of a group; none if its name does not contain them.

        >>> history = CollectiveHistory(ranks=(0, 1, 2))
        >>> history.ranks_in("[0, 2]"), history.ranks_in(""), history.ranks_in("'tensor parallel'")
        ((0, 2), (0, 1, 2), ())
        """
        if not group:
            return self.ranks
        return tuple(ast.literal_eval(group)) if group.startswith("[") else ()

    def copy(self) -> CollectiveHistory:
        """Return an independent copy."""
        return replace(
            self,
            matched=deque(self.matched),
            tracks={rank: track.copy() for rank, track in self.tracks.items()},
            waits=self.waits.copy(),
            gpu_times={title: dict(ranks) for title, ranks in self.gpu_times.items()},
            newest=dict(self.newest),
        )

    def seconds_on_gpu(self) -> dict[str, dict[int, float]]:
        """Return the mean seconds of each kind of collective, by rank; the longest kind first.

        An NCCL kernel starts when its own rank arrives, and waits on the GPU for the others. The
        rank with the shortest time arrived last.
        """
        dearest_first = sorted(
            self.gpu_times.items(), key=lambda item: -max(spent for _, spent in item[1].values())
        )
        return {
            title: {rank: seconds / count for rank, (count, seconds) in sorted(ranks.items())}
            for title, ranks in dearest_first
        }

    def add_gpu_times(self, rank: int, message: CollectiveArrivals) -> None:
        """Add the GPU times of some collectives of a rank."""
        for microseconds, kind in chunks(message.durations, 2):
            name, shape, group = message.kinds[kind][:3]
            title = Collective(name, 0, group, shape).kind
            if title not in self.gpu_times and len(self.gpu_times) >= MAX_KINDS:
                continue
            count, seconds = self.gpu_times.setdefault(title, {}).get(rank, (0, 0.0))
            self.gpu_times[title][rank] = count + 1, seconds + microseconds / 1e6
