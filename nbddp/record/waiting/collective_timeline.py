"""Where a cell's time went: who waited for whom, before what, and at which line that one was."""

from __future__ import annotations

import importlib.util
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbddp.errors import format_place
from nbddp.record.waiting.collective_history import (
    Arrival,
    CollectiveHistory,
    MatchedCollective,
    Place,
    main_place,
)
from nbddp.record.waiting.collective_matcher import Straggler
from nbddp.wire.collective import Collective

# seconds that a rank of a cell that runs may be late in telling that it came
MAX_REPORT_DELAY = 3.0
Span = tuple[float, float]  # begin and end, in seconds of time.time()


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpOverlap:
    """DDP's own measurements of one model on one rank, in seconds, as averages.

    torch samples the first iterations and every hundredth after them.

    Attributes:
        name: what the cell calls the model.
        iteration: the last one that was sampled.
        forward: computing the forward pass.
        backward: from the first to the last gradient of the backward pass.
        communication: from the first bucket that is sent to the last that arrives, with the waiting
            for the last rank.
        overlapped: the part of the communication during the backward pass.
        buckets: their sizes in bytes, in the order in which they are sent.
    """

    rank: int
    name: str
    iteration: int
    forward: float
    backward: float
    communication: float
    overlapped: float
    buckets: tuple[int, ...] = ()

    @property
    def exposed(self) -> float:
        """The seconds of communication during which nothing is computed."""
        return max(0.0, self.communication - self.overlapped)


def overlap_of(
    rank: int, name: str, measured: Mapping[str, Any], *, since: float = 0.0
) -> DdpOverlap | None:
    """Read what ``_get_ddp_logging_data()`` of a model returned; None if it measured nothing since.

    Args:
        rank: whose model it is.
        name: what the cell calls it.
        measured: what it says.
        since: in seconds of the rank's ``time.time()``.

    >>> overlap_of(0, "model", {"iteration": 3}) is None
    True
    """
    if not measured.get("avg_forward_compute_time"):
        return None
    if since and _seconds(measured, "backward_compute_time_end") < since:
        return None
    sizes = measured.get("rebuilt_bucket_sizes") or measured.get("bucket_sizes") or ""
    return DdpOverlap(
        rank=rank,
        name=name,
        iteration=int(measured.get("iteration", 0)),
        forward=_seconds(measured, "avg_forward_compute_time"),
        backward=_seconds(measured, "avg_backward_compute_time"),
        communication=_seconds(measured, "avg_backward_comm_time"),
        overlapped=_seconds(measured, "avg_backward_compute_comm_overlap_time"),
        buckets=tuple(int(size) for size in str(sizes).split(",") if size.strip()),
    )


def _seconds(measured: Mapping[str, Any], name: str) -> float:
    return float(measured.get(name) or 0) / 1e9


@dataclass(frozen=True, slots=True)
class UnfinishedCollective:
    """A collective in which ranks waited until the end, or still wait, for some that did not come.

    Attributes:
        call: which collective it is.
        arrivals: when each of those that waited came, in seconds of ``time.time()``.
        waited_until: until when each of them waited.
        missing: the ranks that did not come.
        places: how often one of these was seen at which line meanwhile.
    """

    call: Collective
    arrivals: Mapping[int, float]
    waited_until: Mapping[int, float]
    missing: tuple[int, ...]
    places: Mapping[Place, int]

    @property
    def wait_seconds(self) -> dict[int, float]:
        """Seconds that each rank waited."""
        return {rank: self.waited_until[rank] - at for rank, at in self.arrivals.items()}

    @property
    def place(self) -> Place | None:
        """Where those that were missing mostly were."""
        return main_place(self.places)

    def waits_by_pair(self) -> Iterator[tuple[int, int, float]]:
        """Waiter, awaited and seconds; of several that were missing each has a part of them."""
        for rank, seconds in self.wait_seconds.items():
            for missing in self.missing:
                yield rank, missing, seconds / len(self.missing)


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
    overlaps: tuple[DdpOverlap, ...] = ()
    is_over: bool = True
    unmet: tuple[UnfinishedCollective, ...] = ()
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
        return sum(collective.loading for collective in self.meetings)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each rank in each collective.

        Returns:
            Dicts with ``group``, ``number``, ``name``, ``shape``, ``rank``, ``came`` (seconds of
            ``time.time()``), ``waited`` (seconds) and ``awaited`` (the rank that came last).
        """
        return [
            {
                **collective.call._asdict(),
                "rank": rank,
                "came": came,
                "waited": collective.wait_seconds.get(rank, 0.0),
                "awaited": collective.last_rank,
            }
            for collective in self.meetings
            for rank, came in sorted(collective.arrivals.items())
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
        for collective in self.meetings:
            if collective.wait_seconds.get(rank):
                yield "wait", collective.arrivals[rank], collective.at
        for unfinished in self.unmet:
            if rank in unfinished.arrivals:
                yield "wait", unfinished.arrivals[rank], unfinished.waited_until[rank]
        if rank in self.died:
            yield "gone", self.died[rank], self.span[1]


def build_timeline(
    history: CollectiveHistory,
    awaited: Straggler | None = None,
    *,
    last: int | None = None,
    unmet: Sequence[UnfinishedCollective] = (),
    died: Mapping[int, float] | None = None,
) -> Timeline:
    """What was told of a cell as its time line.

    Args:
        history: what is kept of it.
        awaited: the rank that is waited for, if one is.
        last: look at the last so many steps, or collectives where no steps were reported.
        unmet: what ranks waited in at its end.
        died: when ranks died.
    """
    # where ranks are in different ones
    unfinished_positions = {each.call.position for each in unmet}
    meetings = [each for each in history.matched if each.call.position not in unfinished_positions]
    first: dict[float, float] = {}  # when each step was reported first
    for track in history.tracks.values():
        for at, step in track.steps:
            first[step] = min(at, first.get(step, at))
    steps = sorted((at, step) for step, at in first.items())
    began, end = _span(history, meetings, steps, last)
    died = died or {}
    end = max([end, *(at for each in unmet for at in each.waited_until.values()), *died.values()])
    meetings = [each for each in meetings if each.at >= began]
    waits = defaultdict[tuple[int, int], float](float)
    if last is None and history.count > len(meetings):  # of a long cell, not all are kept
        waits |= history.waits
    else:
        for collective in meetings:
            for rank, seconds in collective.wait_seconds.items():
                waits[rank, collective.last_rank] += seconds
    for each in unmet:
        for waiter, missing, seconds in each.waits_by_pair():
            waits[waiter, missing] += seconds
    return Timeline(
        cell=history.cell,
        ranks=history.ranks,
        span=(began, end),
        meetings=tuple(meetings),
        steps=tuple(each for each in steps if began <= each[0] <= end),
        loads={rank: _clip(each.loads, began, end) for rank, each in history.tracks.items()},
        waits={pair: seconds for pair, seconds in sorted(waits.items()) if seconds},
        lines=_seconds_by_line(meetings, unmet),
        on_gpu=history.seconds_on_gpu(),
        lost=history.lost,
        thinned=history.thinned,
        error=max((each.error for each in history.tracks.values()), default=0.0),
        awaited=awaited,
        unmet=tuple(unmet),
        died=died,
    )


def _span(
    history: CollectiveHistory,
    meetings: Sequence[MatchedCollective],
    steps: Sequence[Span],
    last: int | None,
) -> Span:
    began, newest = history.began, meetings[-1].at if meetings else 0.0
    end = max([began, newest, *(each.reported_at for each in history.tracks.values())])
    if last is None:
        return began, end
    if len(steps) > 1:
        return steps[max(0, len(steps) - 1 - last)][0], max(steps[-1][0], newest)
    shown = meetings[-last:]
    return min([*shown[0].arrivals.values()] if shown else [began]), end


def _clip(spans: Sequence[Span], began: float, end: float) -> list[Span]:
    return [(max(a, began), min(b, end)) for a, b in spans if b > began and a < end]


def _seconds_by_line(
    meetings: Sequence[MatchedCollective], unmet: Sequence[UnfinishedCollective]
) -> dict[str, float]:
    """Seconds of waiting by line: those for a rank are shared out by where it was seen."""
    waited = defaultdict[int, float](float)
    seen = defaultdict[int, Counter[Place]](Counter)
    for collective in meetings:
        waited[collective.last_rank] += collective.total_wait
        seen[collective.last_rank].update(collective.places)
    shares: list[tuple[float, Mapping[Place, int]]] = [
        *((waited[rank], places) for rank, places in seen.items()),
        *((sum(collective.wait_seconds.values()), collective.places) for collective in unmet),
    ]
    by_line = defaultdict[str, float](float)
    for seconds, places in shares:
        for place, count in places.items():
            by_line[format_place(*place)] += seconds * count / sum(places.values())
    return dict(sorted(by_line.items(), key=lambda line: -line[1]))


def find_unfinished(
    history: CollectiveHistory, until: float, *, is_over: bool
) -> list[UnfinishedCollective]:
    """What ranks wait in at a cell's end, or now.

    Args:
        history: what is kept of the cell.
        until: when it ended, or what time it is, as ``time.time()`` has it.
        is_over: which of the two.
    """
    waiting: dict[tuple[Collective, int], dict[int, Arrival]] = {}
    for rank, track in history.tracks.items():
        last = track.last_arrival
        if last is not None and last.waits_for_all:
            key = last.call._replace(shape=""), last.turn
            waiting.setdefault(key, {})[rank] = last
    unfinished = (_unfinished(history, lasts, until) for lasts in waiting.values())
    return [
        collective
        for collective in unfinished
        if collective.missing
        and (is_over or until - max(collective.arrivals.values()) > MAX_REPORT_DELAY)
    ]


def _unfinished(
    history: CollectiveHistory, lasts: Mapping[int, Arrival], until: float
) -> UnfinishedCollective:
    last = next(iter(lasts.values()))
    ranks = history.ranks_in(last.call.group)
    missing = tuple(rank for rank in ranks if not _has_arrived(history, rank, last))
    tracks = {rank: history.tracks[rank] for rank in lasts}
    arrivals = {rank: each.at for rank, each in lasts.items()}
    ends = {rank: each.reported_at if each.is_over else until for rank, each in tracks.items()}
    places: Counter[Place] = Counter()
    for rank in missing:
        if rank in history.tracks:
            first, end = min(arrivals.values()), max(ends.values())
            places.update(history.tracks[rank].count_places(first, end))
    return UnfinishedCollective(
        call=last.call,
        arrivals=arrivals,
        waited_until={rank: max(arrivals[rank], end) for rank, end in ends.items()},
        missing=missing,
        places=places,
    )


def _has_arrived(history: CollectiveHistory, rank: int, to: Arrival) -> bool:
    """Whether a rank came to this collective, or went beyond it."""
    newest = history.newest.get((to.call.group, to.turn, rank), 0)
    if newest != to.call.number:
        return newest > to.call.number
    track = history.tracks.get(rank)
    last = None if track is None else track.last_arrival
    is_there = last is not None and (last.call.group, last.turn) == (to.call.group, to.turn)
    return not is_there or last is None or last.call.name == to.call.name
