"""Where a cell's time went: who waited for whom, before what, and at which line that one was."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbddp.errors import say_place
from nbddp.record.overlap import Overlap
from nbddp.record.unmet import Unmet
from nbddp.record.waiting.collective_history import (
    CollectiveHistory,
    MatchedCollective,
    Place,
    RankTrack,
)
from nbddp.record.waiting.collective_matcher import Straggler

Span = tuple[float, float]  # begin and end, in seconds of time.time()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Where the time of a cell went, or of its last steps.

    A rank waits from when it comes to a collective until the last one comes, if nobody is through
    before that. How long the collective then takes is not in it: Gloo does not tell. Of NCCL's
    collectives the times are those of enqueueing.

    Attributes:
        cell: its number.
        ranks: those that it ran on.
        span: begin and end of what is looked at, in seconds of ``time.time()``.
        meetings: the collectives that all ranks of a group came to, in order.
        steps: when which step was reported first, in seconds of ``time.time()``.
        loads: of each rank, begin and end of each wait for a batch of a ``DataLoader``.
        waits: seconds that a rank waited for another, by (waiter, awaited).
        lines: seconds that ranks waited, by the line at which the awaited one then was; as it is
            looked at 20 times a second, this is an estimate.
        on_gpu: seconds that one collective of each kind took on the GPU, on each rank, on average
            over the cell, where NCCL measures that; the waiting for the last rank is in it.
        lost: collectives that were begun faster than they could be read; ``thinned``: those that
            were left out for being too many.
        error: seconds by which the clocks of two machines may be apart.
        awaited: the rank that the others wait for, if one of them stands out.
        overlaps: what DDP has measured of its models, where the ranks have some and are idle.
        is_over: whether the cell was over when this was reckoned.
        unmet: collectives in which ranks waited until the end, or still do, for some that did not
            come; their seconds are in ``waits`` and ``lines`` too.
        died: when the process of each rank that died ended, in seconds of ``time.time()``.
    """

    cell: int
    ranks: tuple[int, ...]
    span: Span
    meetings: tuple[MatchedCollective, ...] = ()
    steps: tuple[Span, ...] = ()
    loads: Mapping[int, Sequence[Span]] = field(default_factory=dict)
    waits: Mapping[tuple[int, int], float] = field(default_factory=dict)
    lines: Mapping[str, float] = field(default_factory=dict)
    on_gpu: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    lost: int = 0
    thinned: int = 0
    error: float = 0.0
    awaited: Straggler | None = None
    overlaps: tuple[Overlap, ...] = ()
    is_over: bool = True
    unmet: tuple[Unmet, ...] = ()
    died: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether there were no collectives."""
        return not self.meetings and not self.unmet

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.span[1] - self.span[0]

    def loading(self, rank: int) -> float:
        """Seconds that a rank waited for data."""
        return sum(end - began for began, end in self.loads.get(rank, ()))

    def loading_awaited(self) -> float:
        """Seconds that ranks waited for one that itself waited for data, all together."""
        return sum(each.loading for each in self.meetings)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each rank in each collective.

        Returns:
            Dicts with ``group``, ``number``, ``name``, ``shape``, ``rank``, ``came`` (seconds of
            ``time.time()``), ``waited`` (seconds) and ``awaited`` (the rank that came last).
        """
        return [
            {
                **each.call._asdict(),
                "rank": rank,
                "came": came,
                "waited": each.waits.get(rank, 0.0),
                "awaited": each.awaited,
            }
            for each in self.meetings
            for rank, came in sorted(each.came.items())
        ]

    def frame(self) -> Any:
        """The rows as a ``pandas.DataFrame``; where there is no pandas, as they are."""
        rows = self.rows()
        if importlib.util.find_spec("pandas") is None:
            return rows
        return importlib.import_module("pandas").DataFrame(rows)

    def pieces(self, rank: int) -> Iterator[tuple[str, float, float]]:
        """What a rank did, piece by piece: "data", "wait" and "gone"; else it computed.

        Yields:
            What, and begin and end of it in seconds of ``time.time()``.

        >>> line = Timeline(cell=1, ranks=(0,), span=(0.0, 9.0), loads={0: [(1.0, 2.0)]})
        >>> list(line.pieces(0))
        [('data', 1.0, 2.0)]
        """
        for began, end in self.loads.get(rank, ()):
            yield "data", began, end
        for each in self.meetings:
            if each.waits.get(rank):
                yield "wait", each.came[rank], each.at
        for last in self.unmet:
            if rank in last.came:
                yield "wait", last.came[rank], last.until[rank]
        if rank in self.died:
            yield "gone", self.died[rank], self.span[1]


def spent(
    told: CollectiveHistory,
    awaited: Straggler | None = None,
    *,
    last: int | None = None,
    unmet: Sequence[Unmet] = (),
    died: Mapping[int, float] | None = None,
) -> Timeline:
    """What was told of a cell as its time line.

    Args:
        told: what is kept of it.
        awaited: the rank that is waited for, if one is.
        last: look at the last so many steps, or collectives where no steps were reported.
        unmet: what ranks waited in at its end.
        died: when ranks died.
    """
    apart = {
        (each.call.group, each.call.number) for each in unmet
    }  # where ranks are in different ones
    meetings = [each for each in told.matched if (each.call.group, each.call.number) not in apart]
    steps = _steps(told.tracks)
    began, end = _span(told, meetings, steps, last)
    died = died or {}
    end = max([end, *(at for each in unmet for at in each.until.values()), *died.values()])
    meetings = [each for each in meetings if each.at >= began]
    is_all = last is None and told.count > len(meetings)
    waits = Counter(told.waits if is_all else _waits(meetings))
    for each in unmet:
        for waiter, missing, seconds in each.between():
            waits[waiter, missing] += seconds  # type: ignore[assignment]
    return Timeline(
        cell=told.cell,
        ranks=told.ranks,
        span=(began, end),
        meetings=tuple(meetings),
        steps=tuple(each for each in steps if began <= each[0] <= end),
        loads={rank: _within(each.loads, began, end) for rank, each in told.tracks.items()},
        waits=dict(sorted(waits.items())),
        lines=_lines(meetings, unmet),
        on_gpu=told.seconds_on_gpu(),
        lost=told.lost,
        thinned=told.thinned,
        error=max((each.error for each in told.tracks.values()), default=0.0),
        awaited=awaited,
        unmet=tuple(unmet),
        died=died,
    )


def _steps(tracks: Mapping[int, RankTrack]) -> list[Span]:
    """When each step was reported first, as (time, step)."""
    first: dict[float, float] = {}
    for track in tracks.values():
        for at, step in track.steps:
            first[step] = min(at, first.get(step, at))
    return sorted((at, step) for step, at in first.items())


def _span(
    told: CollectiveHistory,
    meetings: Sequence[MatchedCollective],
    steps: Sequence[Span],
    last: int | None,
) -> Span:
    tracks = told.tracks.values()
    began = told.began
    ends = [each.reported_at for each in tracks] + [each.at for each in meetings[-1:]]
    end = max([began, *ends])
    if last is None:
        return began, end
    if len(steps) > 1:
        return steps[max(0, len(steps) - 1 - last)][0], max(steps[-1][0], _newest(meetings))
    shown = meetings[-last:]
    return min([*shown[0].came.values()] if shown else [began]), end


def _newest(meetings: Sequence[MatchedCollective]) -> float:
    return meetings[-1].at if meetings else 0.0


def _waits(meetings: Sequence[MatchedCollective]) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for each in meetings:
        for rank, seconds in each.waits.items():
            if seconds:
                found[rank, each.awaited] += seconds  # type: ignore[assignment]
    return found


def _within(spans: Sequence[Span], began: float, end: float) -> list[Span]:
    return [(max(a, began), min(b, end)) for a, b in spans if b > began and a < end]


def _lines(meetings: Sequence[MatchedCollective], unmet: Sequence[Unmet]) -> dict[str, float]:
    """Seconds of waiting by line: those for a rank are shared out by where it was seen."""
    waited: Counter[int] = Counter()
    seen: dict[int, Counter[Place]] = {}
    for each in meetings:
        waited[each.awaited] += each.waited  # type: ignore[assignment]
        seen.setdefault(each.awaited, Counter()).update(each.places)
    found: Counter[str] = Counter()
    for rank, places in seen.items():
        for place, count in places.items():
            found[say_place(*place)] += waited[rank] * count / places.total()  # type: ignore[assignment]
    for last in unmet:
        seconds = sum(last.waits.values())
        for place, count in last.places.items():
            found[say_place(*place)] += seconds * count / sum(last.places.values())  # type: ignore[assignment]
    return dict(found.most_common())
