"""A snapshot of a worker group at one moment, for all views."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType

from nbddp.lifecycle.group_state import GroupState, Life, RankLife, RankState
from nbddp.record.cell import CellHandle
from nbddp.record.collectives.collective_matcher import Straggler
from nbddp.record.collectives.stragglers import StragglerLag
from nbddp.record.event_log import EventLog, merge_equal_failures
from nbddp.record.hang_detector import Heartbeat
from nbddp.record.rank_monitor import LoopProgress, RankMonitor
from nbddp.record.run_events import RunEvent
from nbddp.wire.messages import RankStatus, Ready


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsage:
    """The use of a GPU by all processes at one moment.

    Attributes:
        load: percent of recent time in which the GPU ran a kernel; negative if unknown.
        used: bytes of its memory in use, of ``total``.
        used_by_others: bytes used by processes that are not ranks of this group, such as the
            notebook's own; negative if unknown, as in most containers.
    """

    load: float = -1.0
    used: int = 0
    total: int = 0
    used_by_others: int = -1


UNKNOWN_USAGE = GpuUsage()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """One rank at one moment.

    Attributes:
        state: the rank's activity or end, in words.
        node: its machine, if there are several.
        line: the cell's line that the rank runs; 0 if none.
        file: the name of a script, or of another cell, that contains the line.
        code: the source of the line.
        seconds: time since the rank last moved; 0 if it moves.
        age: seconds since its last report.
        importing: the module that the line imports; empty if it imports none.
        collective: its newest collective, with number and shape.
        step: the last step that it reported; None if none.
        steps_per_second: 0 if unknown.
        cpu: percent of one core; negative if unknown.
        memory: in bytes.
        gpu: the name of its GPU; empty without one.
        gpu_memory: bytes that its tensors use on the GPU.
        gpu_reserved: bytes that torch has reserved on the GPU for them.
        gpu_usage: the use of that GPU by all processes.
        gpu_ranks: the other ranks on that GPU.
        lag: by how much it is slower than the others; None if it is not, or if that is unknown.
        is_alive: whether its process exists.
        is_healthy: whether it had no failure.
        is_first_cause: whether it failed by itself, not as a consequence such as an interrupt.
        is_over: whether the rank ended the cell, with or without success.
    """

    rank: int
    state: str
    node: str = ""
    pid: int = 0
    device: str = ""
    line: int = 0
    file: str = ""
    code: str = ""
    importing: str = ""
    seconds: float = 0.0
    age: float = 0.0
    collective: str = ""
    step: float | None = None
    steps_per_second: float = 0.0
    cpu: float = 0.0
    memory: int = 0
    gpu: str = ""
    gpu_memory: int = 0
    gpu_reserved: int = 0
    gpu_usage: GpuUsage = UNKNOWN_USAGE
    gpu_ranks: tuple[int, ...] = ()
    progress_bars: tuple[LoopProgress, ...] = ()
    lag: StragglerLag | None = None
    is_alive: bool = True
    is_healthy: bool = True
    is_first_cause: bool = False
    is_over: bool = False

    @property
    def position(self) -> str:
        """The line in a short form: ``12``, ``train.py:12``."""
        return f"{self.file}:{self.line}" if self.file else str(self.line)

    @property
    def is_active(self) -> bool:
        """Whether the rank still runs the cell."""
        return self.is_alive and self.is_healthy and not self.is_over


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A worker group at one moment, and its current or last cell.

    Attributes:
        state: the state of the group.
        at: the moment, as ``time.time()``.
        began: start of the cell or, without a cell, of the attempt.
        start_of: what began then, in words.
        seconds: duration since ``began``, up to the end of the cell.
        script: the name of the script that the cell runs; empty without one.
        run: the name of the run's ``folder``.
        ranks: the ranks of the group, or of the cell if the group has changed since.
        events: the events since the start of the cell or of the group.
        alarm: the card about a hang or a silent rank, in several lines; empty if there is none.
        straggler: the rank for which the others wait; None if there is none.
        missed_rows: number of metrics rows that are only in the file.
        rejected_messages: number of messages that this group did not sign.
    """

    state: GroupState
    at: float = 0.0
    began: float = 0.0
    start_of: str = "the ranks"
    seconds: float = 0.0
    attempt: int = 0
    backend: str = ""
    devices: tuple[str, ...] = ()
    script: str = ""
    folder: str = ""
    run: str = ""
    ranks: tuple[RankSnapshot, ...] = ()
    events: tuple[RunEvent, ...] = ()
    alarm: str = ""
    straggler: Straggler | None = None
    missed_rows: int = 0
    rejected_messages: int = 0

    @property
    def alive(self) -> list[int]:
        """The ranks with a living process."""
        return [rank.rank for rank in self.ranks if rank.is_alive]


SampleGpus = Callable[[Mapping[str, Set[int]]], Mapping[str, GpuUsage]]
_StateWords = tuple[str, bool, bool]  # state in words, is_healthy, is_first_cause


def build_snapshot(
    life: Life,
    *,
    cell: CellHandle | None,
    rank_monitor: RankMonitor,
    event_log: EventLog,
    ready: Mapping[int, Ready],
    rejected_messages: int = 0,
    is_for_cell: bool = True,
    sample_gpus: SampleGpus = lambda _pids: {},
    nodes: Mapping[int, str] = MappingProxyType({}),
) -> Snapshot:
    """Build a snapshot. Any thread may call this.

    ``is_for_cell``: show how the cell ended on each rank, not the present state of the rank.
    ``sample_gpus`` returns the usage of GPUs, given their UUIDs and our processes on each.
    ``nodes``: the machine of each rank, if there are several.
    """
    at = time.time()
    if cell is not None and not is_for_cell and cell.attempt != life.attempt:
        cell = None  # it ran on ranks of an earlier attempt
    shown = cell if is_for_cell else None
    folder, alarm = event_log.folder, rank_monitor.hangs.problem_text
    ready = dict(sorted(dict(ready).items()))
    heartbeats = rank_monitor.hangs.heartbeats.copy()
    lags = rank_monitor.lags(cell.ranks) if cell else {}
    events = event_log.since(cell.began_at) if cell else event_log.of_attempt(life.run_attempt)
    began = cell.began_at if cell else events[0].time if events else at
    script = cell.request.script.name if cell and cell.request.script else ""
    number = shown.number if shown else -1
    asks = (each.status.asks for each in heartbeats.values() if each.status.cell == number)
    question = next(filter(None, asks), "")
    cause = cell.verdict.first.headline() if cell and cell.verdict else ""
    ranks = []
    for rank_life in _rank_lives(life, shown):
        rank = rank_life.rank
        state, heartbeat = _rank_state(rank_life, shown), heartbeats.get(rank)
        snapshot = _rank_snapshot(rank_life, cell, state, rank_monitor, heartbeat, question)
        if message := ready.get(rank):
            snapshot = replace(snapshot, pid=message.pid, device=message.device)
            if shown is None and rank_life.is_alive and rank_monitor.hangs.is_stopped(rank):
                words = f"stopped by a signal: `kill -CONT {message.pid}` continues it"
                snapshot = replace(snapshot, state=words)
        lag = lags.get(rank) if rank_life.is_alive else None
        ranks.append(replace(snapshot, node=nodes.get(rank, ""), lag=lag))
    return Snapshot(
        state=life.state,
        at=at,
        began=began,
        start_of=script or (f"cell [{cell.prompt}]" if cell else "the ranks"),
        seconds=cell.seconds if cell else at - began,
        attempt=life.run_attempt,
        backend=", ".join(sorted({message.backend for message in ready.values()})),
        devices=tuple(message.device for message in ready.values()),
        script=script,
        folder=str(folder or ""),
        run=folder.name if folder else "",
        ranks=_with_gpus(ranks, heartbeats, sample_gpus),
        events=merge_equal_failures(events, cause=cause, alarm=alarm),
        alarm=alarm,
        straggler=rank_monitor.collectives.straggler() if lags else None,
        missed_rows=rank_monitor.missed_rows if cell else 0,
        rejected_messages=rejected_messages,
    )


def _with_gpus(
    ranks: Sequence[RankSnapshot], heartbeats: Mapping[int, Heartbeat], sample_gpus: SampleGpus
) -> tuple[RankSnapshot, ...]:
    """Add the usage of whole GPUs, and the ranks that share each GPU."""
    uuids = {each.rank: heartbeats[each.rank].status.gpu for each in ranks if each.gpu}
    pids: dict[str, dict[int, int]] = defaultdict(dict)  # of the ranks on each GPU
    for snapshot in ranks:
        if uuid := uuids.get(snapshot.rank):
            pids[uuid][snapshot.rank] = snapshot.pid
    if not pids:
        return tuple(ranks)
    usage = sample_gpus({uuid: {*on_gpu.values()} for uuid, on_gpu in pids.items()})
    with_gpus = []
    for snapshot in ranks:
        if uuid := uuids.get(snapshot.rank):
            others = tuple(rank for rank in pids[uuid] if rank != snapshot.rank)
            snapshot = replace(snapshot, gpu_usage=usage.get(uuid, UNKNOWN_USAGE), gpu_ranks=others)
        with_gpus.append(snapshot)
    return tuple(with_gpus)


def _rank_lives(life: Life, cell: CellHandle | None) -> tuple[RankLife, ...]:
    """Return the ranks of the group, or of the cell if the group stopped or restarted since."""
    if cell is None or (life.attempt == cell.attempt and life.ranks):
        return life.ranks
    return tuple(RankLife(rank, RankState.GONE, cell.exits.get(rank)) for rank in cell.ranks)


def _rank_snapshot(
    life: RankLife,
    cell: CellHandle | None,
    state: _StateWords,
    rank_monitor: RankMonitor,
    heartbeat: Heartbeat | None,
    question: str,
) -> RankSnapshot:
    """Describe a rank by its last heartbeat; ``question`` is an input request of any rank."""
    status = heartbeat.status if heartbeat else RankStatus(cell=0, line=0, function="")
    age = time.monotonic() - heartbeat.at if heartbeat else 0.0
    is_inside = life.state is RankState.RUNNING and cell is not None and status.cell == cell.number
    rate = rank_monitor.metrics.step_rate(life.rank) if cell else None
    words, is_healthy, is_first_cause = state
    # a rank that moved until it died may have called more collectives since its last heartbeat
    is_stale = life.state is RankState.GONE and is_first_cause and not status.seconds
    is_of_cell = cell is not None and status.last_cell == cell.number and not is_stale
    steps = status.steps if is_of_cell else {}  # from the same moment as the collective
    if is_inside and status.asks:
        words = f"in {status.asks}"
    elif is_inside and status.collective:
        words = f"waiting for {question}" if question else "waiting"
    elif is_inside and status.importing:
        words = f"importing {status.importing}"
    return RankSnapshot(
        rank=life.rank,
        state=words,
        line=status.line if is_inside else 0,
        file=status.file if is_inside else "",
        code=status.code if is_inside else "",
        importing=status.importing if is_inside else "",
        seconds=status.seconds + age if is_inside and status.seconds else 0.0,
        age=age,
        collective=str(status.last or "") if is_of_cell else "",
        step=steps.get(rate.loop, rate.step) if rate else None,
        steps_per_second=rate.per_second if rate else 0.0,
        cpu=status.cpu if is_inside or not status.cell else -1.0,  # not of a cell that ended
        memory=status.memory,
        gpu=status.gpu_name if life.is_alive else "",
        gpu_memory=status.gpu_memory,
        gpu_reserved=status.gpu_reserved,
        progress_bars=rank_monitor.progress_bars.get(life.rank, ()) if cell else (),
        is_alive=life.is_alive,
        is_healthy=is_healthy,
        is_first_cause=is_first_cause,
        is_over=cell is not None and (cell.is_finished or cell.has_ended(life.rank)),
    )


def _rank_state(life: RankLife, cell: CellHandle | None) -> _StateWords:
    if life.state is RankState.GONE and cell is not None and cell.was_ended_by_user(life.rank):
        return f"ended by the {cell.ended_by}", False, False
    if life.state is RankState.GONE:
        is_healthy = life.exitcode == 0
        return life.how_it_ended, is_healthy, not is_healthy
    if cell is None or life.rank not in cell.ranks or not cell.has_ended(life.rank):
        return life.state.value, True, False
    failure = cell.failure(life.rank)
    if failure is None:
        return "done", True, False
    if cell.verdict is not None and cell.verdict.is_error_of(life.rank):
        return "failed", False, True
    return failure.headline(), False, not failure.is_consequence
