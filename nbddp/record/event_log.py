"""The event log of a worker group, in memory and in the folder of its run."""

from __future__ import annotations

import errno
import itertools
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from nbddp.private_files import is_private_folder
from nbddp.record import run_folder
from nbddp.record.json_lines import JsonLinesReader
from nbddp.record.log_reader import log_name, read_end
from nbddp.record.run_events import (
    CellEnded,
    CellEvent,
    CellStarted,
    Configured,
    NoProgress,
    RankFailed,
    RanksStarted,
    ReportedEvent,
    RunEvent,
    event_of,
    read_event,
)

MAX_OWN_EVENTS = 1000  # events of the controller in memory; the file has all
MAX_REPORTED_EVENTS = 500  # events of ranks in memory; they do not displace those of the controller
MAX_FACT_CHARS = 4000  # characters of a fact in memory
MAX_FACT_ENTRIES = 1000  # of a list or a dict in memory, each with a part of these characters
MIN_ENTRY_CHARS = 40
FINAL_OUTPUT_CHARS = 2000  # characters of each log

T = TypeVar("T", bound=CellEvent)


def merge_equal_failures(
    events: Iterable[RunEvent], *, cause: str = "", alarm: str = ""
) -> tuple[RunEvent, ...]:
    """Return the events; equal failures of several ranks in a row become one event.

    A view shows the first cause of a failure and the current alarm in full elsewhere. Their events
    are shortened to a few words.
    """
    shown: list[RunEvent] = []
    for event_class, group in itertools.groupby(events, type):
        part = [*group]
        shown += _merge(part, cause) if event_class is RankFailed else part
    return tuple(_shorten_alarm(event, alarm) for event in shown)


def _merge(failures: Iterable[Any], cause: str) -> Iterator[RankFailed]:
    by_text: dict[str, list[RankFailed]] = {}
    for failure in failures:
        by_text.setdefault(failure.what, []).append(failure)
    for what, (first, *others) in by_text.items():
        ranks = tuple(other.rank for other in others)
        yield replace(first, what="failed" if what == cause else what, other_ranks=ranks)


def _shorten_alarm(event: RunEvent, alarm: str) -> RunEvent:
    is_alarm = isinstance(event, NoProgress) and event.text == alarm
    return NoProgress(time=event.time, text=alarm.partition(":")[0]) if is_alarm else event


class EventLog:
    """The events of one worker group. Writes ``run.json`` and ``events.jsonl`` of each run.

    Args:
        notify: gets a message if a run is not recorded below the folder of the notebook, and once
            if its record is incomplete. A failed write must not end a training.

    Attributes:
        folder: the folder of the current run; None if there is none.
        path: the folder of the current or last run.
        is_over: whether that run is over: the next notebook does not continue it.
        run_facts: the facts of that run, as in ``run.json``.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.folder: Path | None = None
        self.path: Path | None = None
        self.is_over = True
        self.run_facts = run_folder.new_facts()
        self.notify = notify
        self._file = -1  # the descriptor of ``events.jsonl``
        self._has_reported = self._line_is_torn = False
        self._written_at = 0.0  # in ``time.monotonic()``
        self._own_events: deque[RunEvent] = deque(maxlen=MAX_OWN_EVENTS)
        self._reported_events: deque[RunEvent] = deque(maxlen=MAX_REPORTED_EVENTS)
        self._attempt_starts: dict[int, float] = {}  # start times by attempt

    def open(self, base: Path, name: str, facts: Mapping[str, Any]) -> Path:
        """Return the run folder. Create it below ``base`` if there is none or it was replaced.

        ``facts`` describe the start and are written to ``run.json``.

        Raises:
            StartError: no folder can be created.
        """
        if self.folder is not None and not is_private_folder(self.folder):
            self.close()
        if self.folder is None:
            path, file = run_folder.create_run_folder(base, name, self.notify)
            self._begin(path, file, run_folder.facts_of_start())
            self.add_facts(facts)
            return path
        return self.folder

    def resume(self, path: Path) -> None:
        """Continue in the run folder of another notebook, if it exists and is private."""
        if is_private_folder(path):
            self.close()
            self._begin(path, run_folder.open_events(path), run_folder.read_facts(path))

    def _begin(self, path: Path, file: int, facts: Mapping[str, Any]) -> None:
        self.folder = self.path = path
        self.is_over = False
        self._file, self.run_facts = file, run_folder.new_facts(facts)
        self._has_reported = self._line_is_torn = False

    def close(self, *, is_over: bool = True) -> None:
        """Close the run folder: the run is over, or the next notebook continues it."""
        if self.folder is not None:
            self.is_over = is_over
            self.folder = None  # first: the system may reuse a closed descriptor
            with suppress(OSError):  # _append() reported a full disk
                os.close(self._file)

    def record(self, event: RunEvent) -> None:
        """Record an event. Ignore settings that another rank has reported."""
        if isinstance(event, Configured) and self.folder is not None:
            recorded = self.run_facts["config"].items()
            if all(setting in recorded for setting in event.values.items()):
                return
        if isinstance(event, RanksStarted):
            self._attempt_starts[event.attempt] = event.time
        facts = event.facts()
        shortened = {name: _shorten_fact(fact) for name, fact in facts.items()}
        is_reported = isinstance(event, ReportedEvent)
        events = self._reported_events if is_reported else self._own_events
        events.append(event_of(event.kind, shortened, event.time))
        if self.folder is not None:
            event.apply(self.run_facts)
            self._append(json.dumps(facts | {"time": round(event.time, 3), "kind": event.kind}))

    def _append(self, line: str) -> None:
        data = ("\n" * self._line_is_torn + f"{line}\n").encode()
        try:
            self._line_is_torn = os.write(self._file, data) < len(data)
            if self._line_is_torn:  # the disk is full: it has a part of the line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._report_error(error)

    def _report_error(self, error: OSError) -> None:
        if not self._has_reported:
            self._has_reported = True
            self.notify(f"the record in {self.path} is not complete: {error.strerror}")

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        """Add facts and write ``run.json``."""
        if self.folder is None:
            return
        self.run_facts.update(facts)
        self._written_at = time.monotonic()
        try:
            run_folder.write_atomic(self.folder / "run.json", run_folder.to_text(self.run_facts))
        except OSError as error:
            self._report_error(error)

    def seconds_since_written(self) -> float:
        """Return the seconds since ``run.json`` was written."""
        return time.monotonic() - self._written_at

    def log_sizes(self, ranks: Iterable[int]) -> dict[str, int]:
        """Return the bytes in each rank's log: the start or end of a cell's part of the log."""
        if self.folder is None:
            return {}
        sizes = {str(rank): 0 for rank in ranks}
        for rank in sizes:
            with suppress(OSError):  # no output yet, or the user deleted the file
                sizes[rank] = (self.folder / log_name(int(rank))).stat().st_size
        return sizes

    def final_output(self, ranks: Iterable[int]) -> str:
        """Return the ends of the logs of these ranks."""
        if self.folder is None:
            return ""
        ends = []
        for rank in ranks:
            with suppress(OSError):
                end, _ = read_end(self.folder / log_name(rank), 4 * FINAL_OUTPUT_CHARS)
                ends.append(end[-FINAL_OUTPUT_CHARS:])
        return "\n".join(ends)

    def since(self, at: float) -> tuple[RunEvent, ...]:
        """Return the events in memory from this time on."""
        events = sorted([*self._own_events, *self._reported_events], key=lambda event: event.time)
        return tuple(event for event in events if event.time >= at)

    def of_cell(self, event_class: type[T], cell: int) -> T | None:
        """Return the start or end event of a cell; None if it is not in memory."""
        events = (each for each in self.since(0.0) if isinstance(each, event_class))
        return next((event for event in events if event.id == cell), None)

    def of_attempt(self, attempt: int) -> tuple[RunEvent, ...]:
        """Return the events in memory since the start of an attempt."""
        began = self._attempt_starts.get(attempt)
        return () if began is None else self.since(began)


def read_unfinished_cell(folder: Path) -> CellStarted | None:
    """Return the last cell of a run whose end is not recorded; None if there is none."""
    last: RunEvent | None = None
    with suppress(OSError):  # the record is lost, and the ranks are not
        for row in JsonLinesReader(folder / "events.jsonl", "kind"):
            with suppress(KeyError):
                event = read_event(row)
                last = event if isinstance(event, CellStarted | CellEnded | RanksStarted) else last
    return last if isinstance(last, CellStarted) else None


def _shorten_fact(fact: Any, most: int = MAX_FACT_CHARS) -> Any:
    """Shorten a fact that is kept in memory. It keeps its type: views read dicts and lists."""
    if isinstance(fact, str):
        return fact if len(fact) <= most else f"{fact[:most]} …"
    is_container = isinstance(fact, dict | list | tuple)
    if not is_container or len(json.dumps(fact, default=str)) <= most:
        return fact
    share = max(MIN_ENTRY_CHARS, most // len(fact))
    if isinstance(fact, dict):
        first = itertools.islice(fact.items(), MAX_FACT_ENTRIES)
        return {_shorten_fact(name, share): _shorten_fact(value, share) for name, value in first}
    return [_shorten_fact(item, share) for item in fact[:MAX_FACT_ENTRIES]]
