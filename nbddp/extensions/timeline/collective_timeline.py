"""Where a cell's time went: which rank waited for which other, in which collective and line."""

from __future__ import annotations

import importlib.util
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbddp.formatting import format_line
from nbddp.record.collectives.collective_history import (
    Arrival,
    CollectiveHistory,
    MatchedCollective,
    Place,
    main_place,
)
from nbddp.record.collectives.collective_matcher import Straggler
from nbddp.wire.collective import Collective

MAX_REPORT_DELAY = 3.0  # seconds by which the report of an arrival may be late while a cell runs
Span = tuple[float, float]  # start and end, in seconds of time.time()
TimedStep = tuple[float, float]  # seconds of time.time(), and the step


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpOverlap:
    """DDP's own measurements of one model on one rank, in seconds, as averages.

    torch samples the first iterations and every hundredth after them.

    Attributes:
        name: the model's name in the cell.
        iteration: the last sampled iteration.
        forward: computation of the forward pass.
        backward: from the first to the last gradient of the backward pass.
        communication: from the start of the first bucket to the end of the last, with the wait for
            the last rank.
        overlapped: the part of the communication during the backward pass.
        buckets: sizes in bytes, in the order of sending.
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
        """Seconds of communication without computation."""
        return max(0.0, self.communication - self.overlapped)


def overlap_of(
    rank: int, name: str, measured: Mapping[str, Any], *, since: float = 0.0
) -> DdpOverlap | None:
    """Read the result of a model's ``_get_ddp_logging_data()``; None if nothing was measured.

    Args:
        rank: the rank of the model.
        name: the model's name in the cell.
        measured: the result.
        since: ignore earlier measurements; in seconds of the rank's ``time.time()``.

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
    """A collective that some ranks never reached. The others waited until the end, or still wait.

    Attributes:
        call: the collective.
        arrivals: arrival time of each waiting rank, in seconds of ``time.time()``.
        waited_until: end of the wait of each of them.
        missing: the ranks that did not arrive.
        places: number of samples of the missing ranks at each line meanwhile.
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
        """The line at which the missing ranks mostly were."""
        return main_place(self.places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Where the time of a cell, or of its last steps, went.

    A rank waits from its arrival at a collective until the last rank arrives, if no rank leaves
    before that. The duration of the collective after that is not included, because Gloo does not
    report it. The times of NCCL's collectives are those of enqueueing.

    Attributes:
        cell: number of the cell.
        ranks: the ranks that ran it.
        span: start and end of the timeline, in seconds of ``time.time()``.
        meetings: the collectives that all ranks of a group reached, in order.
        steps: when each step was first reported, in seconds of ``time.time()``, and the step.
        loads: of each rank, start and end of each wait for a batch of a ``DataLoader``.
        waits: seconds that a rank waited for another, by (waiting rank, last rank).
        lines: seconds that ranks waited, by the line at which the last rank was. This is an
            estimate from 20 samples per second.
        on_gpu: seconds of one collective of each kind on the GPU, on each rank, as an average over
            the cell, if NCCL measures it. They include the wait for the last rank.
        lost: number of collectives that were started faster than they could be read.
        thinned: number of collectives that were omitted because there were too many.
        error: seconds by which the clocks of two machines may differ.
        awaited: the rank for which the others wait, if there is one.
        overlaps: DDP's measurements of its models, if the ranks have some and are idle.
        is_over: whether the cell was over when the timeline was built.
        unmet: collectives that some ranks never reached, so that the others waited until the end,
            or still wait. Their seconds are in ``waits`` and ``lines`` too.
        died: when the process of each dead rank exited, in seconds of ``time.time()``.
    """

    cell: int
    ranks: tuple[int, ...]
    span: Span
    meetings: tuple[MatchedCollective, ...] = ()
    steps: tuple[TimedStep, ...] = ()
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
        """Duration of the timeline."""
        return self.span[1] - self.span[0]

    def loading(self, rank: int) -> float:
        """Return the seconds that a rank waited for data."""
        return sum(end - began for began, end in self.loads.get(rank, ()))

    def loading_awaited(self) -> float:
        """Return the seconds that ranks waited for a rank that waited for data, all together."""
        return sum(collective.loading for collective in self.meetings)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each rank in each collective.

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
        """Return the rows as a ``pandas.DataFrame``, or as a list if pandas is not installed."""
        rows = self.rows()
        if importlib.util.find_spec("pandas") is None:
            return rows
        return importlib.import_module("pandas").DataFrame(rows)

    def pieces(self, rank: int) -> Iterator[tuple[str, float, float]]:
        """Yield the activities of a rank: "data", "wait" and "gone"; otherwise it computed.

        Yields:
            The activity, and its start and end in seconds of ``time.time()``.

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
    """Build the timeline of a cell.

    Args:
        history: the collective history of the cell.
        awaited: the rank for which the others wait, if any.
        last: use only this number of last steps, or of collectives if no steps were reported.
        unmet: the unfinished collectives at the end of the cell.
        died: when ranks died.
    """
    different = {each.call.position for each in unmet}  # ranks called different collectives there
    meetings = [each for each in history.matched if each.call.position not in different]
    first: dict[float, float] = {}  # when each step was first reported
    for track in history.tracks.values():
        for at, step in track.steps:
            first[step] = min(at, first.get(step, at))
    steps = sorted((at, step) for step, at in first.items())
    began, end = _span(history, meetings, steps, last)
    died = died or {}
    waited_until = [at for unfinished in unmet for at in unfinished.waited_until.values()]
    end = max([end, *waited_until, *died.values()])
    meetings = [collective for collective in meetings if collective.at >= began]
    waits = defaultdict[tuple[int, int], float](float)
    if last is None and history.count > len(meetings):  # a long cell drops early collectives
        waits |= history.waits
    else:
        for collective in meetings:
            for rank, seconds in collective.wait_seconds.items():
                waits[rank, collective.last_rank] += seconds
    for unfinished in unmet:
        for waiter, seconds in unfinished.wait_seconds.items():
            for missing in unfinished.missing:  # they share the seconds
                waits[waiter, missing] += seconds / len(unfinished.missing)
    return Timeline(
        cell=history.cell,
        ranks=history.ranks,
        span=(began, end),
        meetings=tuple(meetings),
        steps=tuple((at, step) for at, step in steps if began <= at <= end),
        loads={rank: _clip(track.loads, began, end) for rank, track in history.tracks.items()},
        waits={pair: seconds for pair, seconds in sorted(waits.items()) if seconds},
        lines=_seconds_by_line(meetings, unmet),
        on_gpu=history.seconds_on_gpu(),
        lost=history.lost,
        thinned=history.thinned,
        error=max((track.error for track in history.tracks.values()), default=0.0),
        awaited=awaited,
        unmet=tuple(unmet),
        died=died,
    )


def _span(
    history: CollectiveHistory,
    meetings: Sequence[MatchedCollective],
    steps: Sequence[TimedStep],
    last: int | None,
) -> Span:
    began, newest = history.began, meetings[-1].at if meetings else 0.0
    end = max([began, newest, *(track.reported_at for track in history.tracks.values())])
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
    """Return the seconds of waiting by line, in proportion to the samples of the last rank."""
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
            by_line[format_line(*place)] += seconds * count / sum(places.values())
    return dict(sorted(by_line.items(), key=lambda line: -line[1]))


def find_unfinished(
    history: CollectiveHistory, until: float, *, is_over: bool
) -> list[UnfinishedCollective]:
    """Return the collectives in which ranks wait at the end of a cell, or now.

    Args:
        history: the collective history of the cell.
        until: the end of the cell or the current time, as ``time.time()``.
        is_over: whether ``until`` is the end of the cell.
    """
    waiting: dict[tuple[Collective, int], dict[int, Arrival]] = {}
    for rank, track in history.tracks.items():
        last = track.last_arrival
        if last is not None and last.waits_for_all:
            key = last.call._replace(shape=""), last.turn
            waiting.setdefault(key, {})[rank] = last
    unfinished = (_unfinished(history, arrivals, until) for arrivals in waiting.values())
    return [
        call
        for call in unfinished
        if call.missing and (is_over or until - max(call.arrivals.values()) > MAX_REPORT_DELAY)
    ]


def _unfinished(
    history: CollectiveHistory, last_arrivals: Mapping[int, Arrival], until: float
) -> UnfinishedCollective:
    last = next(iter(last_arrivals.values()))
    ranks = history.ranks_in(last.call.group)
    missing = tuple(rank for rank in ranks if not _has_arrived(history, rank, last))
    tracks = {rank: history.tracks[rank] for rank in last_arrivals}
    arrivals = {rank: arrival.at for rank, arrival in last_arrivals.items()}
    ends = {rank: track.reported_at if track.is_over else until for rank, track in tracks.items()}
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
    """Return whether a rank reached this collective or a later one."""
    newest = history.newest.get((to.call.group, to.turn, rank), 0)
    if newest != to.call.number:
        return newest > to.call.number
    track = history.tracks.get(rank)
    last = None if track is None else track.last_arrival
    is_there = last is not None and (last.call.group, last.turn) == (to.call.group, to.turn)
    return not is_there or last is None or last.call.name == to.call.name
