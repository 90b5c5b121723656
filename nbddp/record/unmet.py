"""Collectives that some ranks came to and others did not: who waited there, until when. Pure.

Who is in another collective of the same number has not come either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nbddp.record.waiting.collective_history import (
    Arrival,
    CollectiveHistory,
    Place,
    main_place,
)
from nbddp.wire.collective import Collective

LATE = 3.0  # seconds that a rank of a cell that runs may be late in telling that it came


@dataclass(frozen=True, slots=True)
class Unmet:
    """A collective in which ranks waited until the end, or still wait, for some that did not come.

    Attributes:
        call: which collective it is.
        came: when each of those that waited came, in seconds of ``time.time()``.
        until: until when each of them waited.
        missing: the ranks that did not come.
        places: how often one of these was seen at which line meanwhile.
    """

    call: Collective
    came: Mapping[int, float]
    until: Mapping[int, float]
    missing: tuple[int, ...]
    places: Mapping[Place, int]

    @property
    def waits(self) -> dict[int, float]:
        """Seconds that each rank waited."""
        return {rank: self.until[rank] - at for rank, at in self.came.items()}

    @property
    def place(self) -> Place | None:
        """Where those that were missing mostly were."""
        return main_place(self.places)

    def between(self) -> Iterator[tuple[int, int, float]]:
        """Waiter, awaited and seconds; of several that were missing each has a part of them."""
        for rank, seconds in self.waits.items():
            for missing in self.missing:
                yield rank, missing, seconds / len(self.missing)


def unmet(told: CollectiveHistory, until: float, *, is_over: bool) -> list[Unmet]:
    """What ranks wait in at a cell's end, or now.

    Args:
        told: what is kept of the cell.
        until: when it ended, or what time it is, as ``time.time()`` has it.
        is_over: which of the two.
    """
    waiting: dict[tuple[Collective, int], dict[int, Arrival]] = {}
    for rank, track in told.tracks.items():
        last = track.last
        if last is not None and last.meets:
            key = last.call._replace(shape=""), last.turn
            waiting.setdefault(key, {})[rank] = last
    found = (_unmet(told, lasts, until) for lasts in waiting.values())
    return [
        each
        for each in found
        if each.missing and (is_over or until - max(each.came.values()) > LATE)
    ]


def _unmet(told: CollectiveHistory, lasts: Mapping[int, Arrival], until: float) -> Unmet:
    last = next(iter(lasts.values()))
    ranks = told.ranks_in(last.call.group)
    missing = tuple(rank for rank in ranks if not _has_come(told, rank, last))
    tracks = {rank: told.tracks[rank] for rank in lasts}
    came = {rank: each.at for rank, each in lasts.items()}
    ends = {rank: each.reported_at if each.is_over else until for rank, each in tracks.items()}
    places: Counter[Place] = Counter()
    for rank in missing:
        if rank in told.tracks:
            first, end = min(came.values()), max(ends.values())
            places.update(told.tracks[rank].seen_at(first, end))
    return Unmet(
        call=last.call,
        came=came,
        until={rank: max(came[rank], end) for rank, end in ends.items()},
        missing=missing,
        places=places,
    )


def _has_come(told: CollectiveHistory, rank: int, to: Arrival) -> bool:
    """Whether a rank came to this collective, or went beyond it."""
    newest = told.newest.get((to.call.group, to.turn, rank), 0)
    if newest != to.call.number:
        return newest > to.call.number
    track = told.tracks.get(rank)
    last = None if track is None else track.last
    is_there = last is not None and (last.call.group, last.turn) == (to.call.group, to.turn)
    return not is_there or last is None or last.call.name == to.call.name
