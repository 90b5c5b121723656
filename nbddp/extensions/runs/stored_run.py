"""A run read from its folder, without ranks, kernel and torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import lt
from pathlib import Path
from typing import Any

from nbddp.errors import RequestError
from nbddp.lifecycle.group_state import GroupState
from nbddp.record import run_events
from nbddp.record.event_log import merge_equal_failures
from nbddp.record.json_lines import JsonLinesReader
from nbddp.record.log_reader import log_name, tail
from nbddp.record.metrics import MetricStore
from nbddp.record.run_folder import read_facts
from nbddp.record.snapshot import RankSnapshot, Snapshot
from nbddp.record.step_rate import StepRate

_RowsOfRanks = dict[int, list[dict[str, Any]]]  # rows of ``metrics.jsonl``, by rank

NOT_METRICS = frozenset({"time", "rank", "attempt", "step"})  # keys of a row of ``metrics.jsonl``

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
MAX_SHOWN_CELLS = 20  # cell numbers in a message
# errors of damaged files
UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError)
# seconds by which the times of events are rounded, unlike those of metrics
EVENT_TIME_ERROR = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCell:
    """A cell of a stored run.

    Attributes:
        ranks: the ranks that ran it.
        began_at: start in ``time.time()``.
        ended_at: end in ``time.time()``; None if the end was not recorded.
        outcome: ``ok``, or the reason of the end in one line; empty without a recorded end.
        report: the full report of a failure.
        failures: how the cell failed on a rank, and whether that was a consequence of another
            failure or of the user's request. Older records have none.
        is_interrupted: whether the cell was interrupted and did not fail.
        is_again: whether nbddp ran the cell again, in a recovery or a replay.
        is_replay: whether this was a replay. Its metrics are not stored again.
        logs: the part of each rank's log that belongs to the cell, as start and end in bytes; the
            end is None without a recorded end.
    """

    number: int
    ranks: tuple[int, ...]
    source: str
    began_at: float
    ended_at: float | None = None
    outcome: str = ""
    report: str = ""
    failures: Mapping[int, tuple[str, bool]] = field(default_factory=dict)
    is_interrupted: bool = False
    is_again: bool = False
    is_replay: bool = False
    logs: Mapping[int, tuple[int, int | None]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether its end was recorded."""
        return self.ended_at is not None

    @property
    def seconds(self) -> float | None:
        """Its duration; None if its end was not recorded."""
        return None if self.ended_at is None else max(0.0, self.ended_at - self.began_at)


class StoredRun:
    """The contents of ``.nbddp/runs/<time>-<name>/``; its metrics are read once, on first use.

    Args:
        path: the folder of the run.
        wanted: the metrics to read; None for all. :class:`MetricStore` keeps the first 64.

    Attributes:
        cells: its cells, in the order in which they ran.
        ranks: all ranks of its last attempt.

    Raises:
        RequestError: there is no run in that folder, or it is damaged.
    """

    def __init__(self, path: Path, wanted: Callable[[str], bool] | None = None) -> None:
        self.path = path
        self._unreadable: dict[str, int] = {}  # number of lines, by file
        self._metrics: dict[float | None, MetricStore] = {}  # by start of a cell; None: all
        self._wanted = wanted
        reader = JsonLinesReader(path / EVENTS, "kind")
        try:
            self.events = tuple(map(run_events.read_event, reader))
            self.cells = _cells(self.events)
            starts = [e for e in self.events if isinstance(e, run_events.RanksStarted)]
            self.ranks = tuple(range(starts[-1].world_size if starts else 0))
        except OSError as error:
            raise RequestError(f"there is no run in {path}: {error.strerror}") from None
        except UNREADABLE as error:
            raise damaged(path, error) from None
        self._unreadable[EVENTS] = reader.unreadable
        self.facts = read_facts(path)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name

    @property
    def unreadable(self) -> int:
        """Number of lines, of those read, that a full disk or a killed process left incomplete."""
        return sum(self._unreadable.values())

    @property
    def was_stopped(self) -> bool:
        """Whether its end was recorded. If not, its kernel was killed, or the run still runs."""
        return bool(self.events) and isinstance(self.events[-1], run_events.GroupStopped)

    def log_path(self, rank: int) -> Path:
        """Return the file with a rank's output, which may not exist."""
        return self.path / log_name(rank)

    def tail(self, rank: int, lines: int, cell: StoredCell | None = None) -> str:
        """Return the last lines of a rank's log, or of a cell's part of it.

        See :func:`nbddp.record.log_reader.tail`.
        """
        begin, end = cell.logs.get(rank, (0, None)) if cell else (0, None)
        try:
            return tail(self.log_path(rank), lines, begin=begin, end=end)
        except FileNotFoundError:  # the rank has no output
            return ""
        except OSError as error:
            return f"{self.log_path(rank)} cannot be read: {error.strerror or error}"

    def cell(self, number: int) -> StoredCell:
        """Return the newest cell of this number, without replays that succeeded.

        Raises:
            RequestError: there is no cell of this number.
        """
        cells = [cell for cell in self.cells if cell.number == number]
        originals = [cell for cell in cells if not (cell.is_replay and cell.outcome == "ok")]
        if cells:
            return (originals or cells)[-1]
        numbers = dict.fromkeys(str(cell.number) for cell in self.cells)  # replays repeat numbers
        shown = ", ".join([*numbers][-MAX_SHOWN_CELLS:]) or "none"
        raise RequestError(f"run {self.name} has no cell {number}; its cells are: {shown}")

    def metrics(self, cell: StoredCell | None = None) -> MetricStore:
        """Return the metrics that its ranks reported, in all cells or in one."""
        began = cell.began_at if cell else None
        if began in self._metrics:
            return self._metrics[began]
        metrics, attempt = MetricStore(), 0
        starts = sorted(each.began_at for each in self.cells if not each.is_again)
        parts: list[dict[int, _RowsOfRanks]] = [{}]  # between recoveries; rows by number of a cell
        recoveries = [event for event in self.events if isinstance(event, run_events.Recovered)]
        resumed_attempts = {event.attempt for event in recoveries if event.healed is None}
        heals = [event.time for event in recoveries if event.healed is not None]
        for row in self.metric_rows(cell):
            is_healed = bool(heals) and row["time"] > heals[0]
            if is_healed or (row["attempt"] != attempt and row["attempt"] in resumed_attempts):
                heals = [at for at in heals if row["time"] <= at]
                parts.append({})
            attempt = row["attempt"]
            ranks = parts[-1].setdefault(bisect_right(starts, row["time"]), {})
            ranks.setdefault(row["rank"], []).append(row)
        for cells in parts:
            metrics.resume()
            self._add_rows(metrics, [ranks for _, ranks in sorted(cells.items())])
        self._metrics[began] = metrics
        return metrics

    def metric_rows(self, cell: StoredCell | None = None) -> Iterator[dict[str, Any]]:
        """Yield the reports of its ranks: ``time``, ``rank``, ``attempt``, and numbers by name.

        Values that are no numbers are omitted.
        """
        rows = self._all_metric_rows()
        return rows if cell is None else (row for row in rows if _is_in(cell, row["time"]))

    def _all_metric_rows(self) -> Iterator[dict[str, Any]]:
        path = self.path / METRICS
        if not path.exists():
            return
        reader = JsonLinesReader(path, "rank", "attempt")
        try:
            for row in reader:
                if set(map(type, row.values())) <= {int, float}:  # the usual case
                    yield row
                elif isinstance(row["rank"], int) and isinstance(row["attempt"], int):
                    yield {
                        name: value for name, value in row.items() if isinstance(value, int | float)
                    }
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error.strerror or error}") from None
        self._unreadable[METRICS] = reader.unreadable

    def _add_rows(self, metrics: MetricStore, cells: Sequence[_RowsOfRanks]) -> None:
        rows = [own for ranks in cells for own in ranks.values()]
        metrics.began = min([metrics.began, *(own[0]["time"] for own in rows)])
        metrics.ended = max([metrics.ended, *(own[-1]["time"] for own in rows)])
        for name in dict.fromkeys(chain.from_iterable(chain.from_iterable(rows))):
            if name not in NOT_METRICS and (self._wanted is None or self._wanted(name)):
                _add_metric(metrics, name, cells)

    def snapshot(self, cell: StoredCell | None = None) -> Snapshot:
        """Return a snapshot of the whole run, or of one cell, for a panel."""
        events = tuple(event for event in self.events if cell is None or _is_in(cell, event.time))
        began, ended = (events[0].time, events[-1].time) if events else (0.0, 0.0)
        metrics = self.metrics(cell)
        attempts = [event.attempt for event in events if isinstance(event, run_events.AttemptEvent)]
        return Snapshot(
            state=GroupState.OFF,
            at=ended,
            began=began,
            start_of=f"cell {cell.number}" if cell else "the run",
            seconds=ended - began,
            attempt=max(attempts, default=0),
            backend=str(self.facts.get("backend_used", "")),
            folder=str(self.path),
            run=self.name,
            ranks=tuple(
                _rank(rank, events, metrics.step_rate(rank), cell)
                for rank in (cell.ranks if cell else self.ranks)
            ),
            events=merge_equal_failures(events),
        )


def _add_metric(metrics: MetricStore, name: str, cells: Sequence[_RowsOfRanks]) -> None:
    """Add a metric of several cells: the steps of later cells follow those of earlier ones."""
    parts: list[_RowsOfRanks] = []
    for ranks in cells:
        by_rank = {rank: [row for row in rows if name in row] for rank, rows in ranks.items()}
        if any(by_rank.values()):
            parts.append({rank: rows for rank, rows in by_rank.items() if rows})
    if len(parts) > 1 and not _has_step_back(parts):  # much faster in one piece
        joined: _RowsOfRanks = {}
        for rank, rows in chain.from_iterable(part.items() for part in parts):
            joined.setdefault(rank, []).extend(rows)
        parts = [joined]
    for number, part in enumerate(parts):
        if number:
            metrics.begin_cell(name)
        for rank, rows in part.items():
            times, steps = [row["time"] for row in rows], [row.get("step") for row in rows]
            metrics.extend(rank, name, times, steps, [row[name] for row in rows])


def _has_step_back(parts: Sequence[_RowsOfRanks]) -> bool:
    """Return whether a step does not ascend, in a cell or from the ranks of an earlier cell."""
    last = -math.inf
    for part in parts:
        of_ranks = [[row.get("step", math.nan) for row in rows] for rows in part.values()]
        if not all(steps[0] >= last and all(map(lt, steps, steps[1:])) for steps in of_ranks):
            return True
        last = max(steps[-1] for steps in of_ranks)
    return False


def damaged(path: Path, error: Exception) -> RequestError:
    """Return the error for a run with a file that cannot be read."""
    reason = f"{type(error).__name__}: {error}"
    return RequestError(f"{path.name} is damaged, or not a run of nbddp ({reason})")


def _cells(events: Sequence[run_events.RunEvent]) -> tuple[StoredCell, ...]:
    ended = {_cell_id(event): event for event in events if isinstance(event, run_events.CellEnded)}
    started = (event for event in events if isinstance(event, run_events.CellStarted))
    return tuple(_cell(event, ended.get(_cell_id(event))) for event in started)


def _cell_id(event: run_events.CellEvent) -> int:
    """Return the id of an event's cell; older records have only the prompt number."""
    return event.number if event.id is None else event.id


def _cell(started: run_events.CellStarted, ended: run_events.CellEnded | None) -> StoredCell:
    end = ended or run_events.CellEnded(number=started.number, outcome="")
    begins, ends = started.logs or {}, end.logs or {}
    return StoredCell(
        number=started.number,
        ranks=tuple(started.ranks),
        source=str(started.source),
        began_at=started.began or started.time,
        ended_at=ended.time if ended else None,
        outcome=end.outcome,
        report=end.report,
        failures={
            rank: (failure["what"], failure["consequence"])
            for failure in end.failures
            for rank in failure["ranks"]
        },
        is_interrupted=end.interrupted,
        is_again=started.again,
        is_replay=started.replay,
        logs={int(rank): (begin, ends.get(rank)) for rank, begin in begins.items()},
    )


def _is_in(cell: StoredCell, at: float) -> bool:
    return cell.began_at <= at and (cell.ended_at is None or at <= cell.ended_at + EVENT_TIME_ERROR)


def _rank(
    rank: int,
    events: Sequence[run_events.RunEvent],
    rate: StepRate | None,
    cell: StoredCell | None,
) -> RankSnapshot:
    exits = [event for event in events if isinstance(event, run_events.RankExited)]
    failures = [event for event in events if isinstance(event, run_events.RankFailed)]
    of_rank = [failure.what for failure in failures if failure.rank == rank]
    of_others = {failure.what for failure in failures if failure.rank != rank}
    problems = [event.how for event in exits if event.rank == rank]
    problems += ("failed" if what in of_others else what for what in of_rank)
    is_first_cause = bool(of_rank)
    if cell is not None and rank in cell.failures:
        what, is_consequence = cell.failures[rank]
        problems, is_first_cause = [what], not is_consequence
    ended = "done" if cell is None or cell.is_over else "its end is not recorded"
    return RankSnapshot(
        rank=rank,
        state=problems[-1] if problems else ended,
        step=rate.step if rate else None,
        steps_per_second=rate.per_second if rate else 0.0,
        is_alive=False,
        is_healthy=not problems,
        is_first_cause=is_first_cause,
    )
