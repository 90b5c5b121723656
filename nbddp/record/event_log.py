"""The event log of a worker group, in memory and in ``events.jsonl``."""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nbddp.record.run_folder import RunFolder

TRIAL_ENDED = "trial ended"  # the user ended a run of a sweep or a scaling before its cell ended
OWN_KINDS = frozenset(
    {
        *("start", "start failed", "ready", "stopped", "exit", "failure", "no progress"),
        *("cell", "cell ended", "interrupt", "restart asked", "stop asked", "kill asked"),
        *("recovery", "resumed", "healed", "not healed", "node", "taken back"),
        TRIAL_ENDED,
    }
)
CONFIG = "config"
MAX_OWN_EVENTS = 1000  # events of the controller in memory; the file has all
MAX_REPORTED_EVENTS = 500  # events of ranks in memory; they do not displace those of the controller
MAX_FACT_CHARS = 4000  # characters of a fact in memory


@dataclass(frozen=True, slots=True)
class RunEvent:
    """An event at a ``time.time()``."""

    at: float
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)


def merge_equal_failures(
    events: Iterable[RunEvent], *, cause: str = "", alarm: str = ""
) -> tuple[RunEvent, ...]:
    """Return the events; equal failures of several ranks in a row become one event.

    A view shows the first cause of a failure and the current alarm in full elsewhere. Their events
    are shortened to a few words.
    """
    shown: list[RunEvent] = []
    for is_failure, group in itertools.groupby(events, lambda event: event.kind == "failure"):
        if not is_failure:
            for event in group:
                is_alarm = alarm and event.facts.get("text") == alarm
                shortened = {"text": alarm.partition(":")[0]}
                shown.append(replace(event, facts=event.facts | shortened) if is_alarm else event)
            continue
        by_text: dict[str, list[RunEvent]] = {}
        for event in group:
            by_text.setdefault(str(event.facts.get("what", "")), []).append(event)
        shown += (_merged(what, of_ranks, cause) for what, of_ranks in by_text.items())
    return tuple(shown)


def _merged(what: str, events: list[RunEvent], cause: str) -> RunEvent:
    if what == cause:
        what = "failed"
    elif len(events) == 1:
        return events[0]
    facts = {"ranks": sorted(event.facts["rank"] for event in events), "what": what}
    return RunEvent(events[0].at, "failure", facts)


class EventLog:
    """The events of one worker group; ``notify`` gets a message if they cannot be written."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.folder: RunFolder | None = None
        self.path: Path | None = None  # of the current or last run
        self.notify = notify
        self._own_events: deque[RunEvent] = deque(maxlen=MAX_OWN_EVENTS)
        self._reported_events: deque[RunEvent] = deque(maxlen=MAX_REPORTED_EVENTS)
        self._attempt_starts: dict[int, float] = {}  # start times by attempt

    def open(self, base: Path, name: str, facts: Mapping[str, Any]) -> RunFolder:
        """Return the run folder. Create it below ``base`` if there is none or the user deleted it.

        ``facts`` describe the start and are written to ``run.json``.
        """
        if self.folder is not None and not self.folder.path.exists():
            self.close()
        if self.folder is None:
            self.folder = RunFolder(base, name, notify=self.notify)
            self.path = self.folder.path
            self.folder.add_facts(**facts)
        return self.folder

    def resume(self, path: Path, begin: Callable[[], RunFolder]) -> RunFolder:
        """Continue in the run folder of another notebook; call ``begin`` if that folder is gone."""
        if path.is_dir():
            self.close()
            self.folder, self.path = RunFolder(path, notify=self.notify, is_existing=True), path
        return self.folder or begin()

    def close(self) -> None:
        """Close the run folder, because the run is over."""
        folder, self.folder = self.folder, None  # first: the system may reuse a closed descriptor
        if folder is not None:
            folder.close()

    def record(self, kind: str, /, **facts: Any) -> None:
        """Record an event of the controller."""
        if kind == "start":
            self._attempt_starts[facts["attempt"]] = time.time()
        self._record(self._own_events, kind, facts)

    def _record(self, events: deque[RunEvent], kind: str, facts: dict[str, Any]) -> None:
        shortened = {name: _shorten_fact(fact) for name, fact in facts.items()}
        events.append(RunEvent(time.time(), kind, shortened))
        if self.folder is not None:
            self.folder.append_event(kind, **facts)

    def log_sizes(self, ranks: Iterable[int]) -> dict[str, int]:
        """Return the bytes in each rank's log: the start or end of a cell's part of the log."""
        sizes = {str(rank): 0 for rank in ranks} if self.folder else {}
        for rank in sizes:
            with suppress(OSError):  # no output yet, or the user deleted the file
                sizes[rank] = self.folder.log_path(int(rank)).stat().st_size if self.folder else 0
        return sizes

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        """Add facts to ``run.json``."""
        if self.folder is not None:
            self.folder.add_facts(**facts)

    def record_reported(self, rank: int, kind: str, facts: dict[str, Any]) -> None:
        """Record an event that a rank reports. It cannot imitate an event of the controller."""
        known = self.folder.run_json.facts["config"].items() if self.folder else ()
        if kind == CONFIG and all(item in known for item in facts["values"].items()):
            return  # another rank reported the same
        kind = f"told: {kind}" if kind in OWN_KINDS else kind
        self._record(self._reported_events, kind, facts | {"rank": rank})

    def final_output(self, ranks: Iterable[int]) -> str:
        """Return the ends of the logs of these ranks."""
        folder = self.folder
        return "\n".join(folder.final_output(rank) for rank in ranks) if folder else ""

    def since(self, at: float) -> tuple[RunEvent, ...]:
        """Return the events in memory from this time on."""
        events = sorted([*self._own_events, *self._reported_events], key=lambda event: event.at)
        return tuple(event for event in events if event.at >= at)

    def of_attempt(self, attempt: int) -> tuple[RunEvent, ...]:
        """Return the events in memory since the start of an attempt."""
        began = self._attempt_starts.get(attempt)
        return () if began is None else self.since(began)


def _shorten_fact(fact: Any) -> Any:
    """Shorten a fact that is kept in memory."""
    if fact is None or isinstance(fact, int | float):
        return fact
    text = fact if isinstance(fact, str) else json.dumps(fact, default=str)
    return fact if len(text) <= MAX_FACT_CHARS else f"{text[:MAX_FACT_CHARS]} …"
