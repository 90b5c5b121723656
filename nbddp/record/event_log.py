"""What happened to a worker group, and when: for the time line, and in the run folder."""

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

OWN_KINDS = frozenset(
    {
        *("start", "start failed", "ready", "stopped", "exit", "failure", "no progress"),
        *("cell", "cell ended", "interrupt", "restart asked", "stop asked", "kill asked"),
        *("recovery", "resumed", "healed", "not healed", "node", "taken back"),
    }
)
CONFIG = "config"
MAX_OWN_EVENTS = 1000  # own events in memory; the file has all
MAX_REPORTED_EVENTS = 500  # events in memory that ranks reported; they do not displace own ones
MAX_FACT_CHARS = 4000  # characters of a fact that are kept here


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that happened, at a time of ``time.time()``."""

    at: float
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)


def merge_equal_failures(
    events: Iterable[RunEvent], *, cause: str = "", alarm: str = ""
) -> tuple[RunEvent, ...]:
    """Return the events, with one event for equal failures that follow each other.

    A view shows the first cause of a failure and the present alarm in full elsewhere: the events
    of these are cut to a few words.
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
    """The record of one worker group's runs; ``notify`` tells the user what cannot be written."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.folder: RunFolder | None = None
        self.path: Path | None = None  # of the run, or of the one that ended last
        self.notify = notify
        self._own_events: deque[RunEvent] = deque(maxlen=MAX_OWN_EVENTS)
        self._reported: deque[RunEvent] = deque(maxlen=MAX_REPORTED_EVENTS)
        self._attempt_starts: dict[int, float] = {}  # when, by attempt

    def open(self, base: Path, name: str, facts: Mapping[str, Any]) -> RunFolder:
        """The folder of the run below ``base``, made when there is none or somebody deleted it.

        ``facts`` say what was started; they stand in its ``run.json``.
        """
        if self.folder is not None and not self.folder.path.exists():
            self.close()
        if self.folder is None:
            self.folder = RunFolder(base, name, notify=self.notify)
            self.path = self.folder.path
            self.folder.add_facts(**facts)
        return self.folder

    def resume(self, path: Path, begin: Callable[[], RunFolder]) -> RunFolder:
        """Go on in the folder of another notebook's run; if it is gone, in a new one."""
        if path.is_dir():
            self.close()
            self.folder, self.path = RunFolder(path, notify=self.notify, is_existing=True), path
        return self.folder or begin()

    def close(self) -> None:
        """The run is over."""
        folder, self.folder = self.folder, None  # first: a descriptor that is closed may be reused
        if folder is not None:
            folder.close()

    def record(self, kind: str, /, **facts: Any) -> None:
        """Record an own event."""
        if kind == "start":
            self._attempt_starts[facts["attempt"]] = time.time()
        self._record(self._own_events, kind, facts)

    def _record(self, events: deque[RunEvent], kind: str, facts: dict[str, Any]) -> None:
        shortened = {name: _shorten_fact(fact) for name, fact in facts.items()}
        events.append(RunEvent(time.time(), kind, shortened))
        if self.folder is not None:
            self.folder.append_event(kind, **facts)

    def log_sizes(self, ranks: Iterable[int]) -> dict[str, int]:
        """How many bytes each rank has written; a cell's part of its log begins or ends there."""
        sizes = {str(rank): 0 for rank in ranks} if self.folder else {}
        for rank in sizes:
            with suppress(OSError):  # it has written nothing, or the user deleted the file
                sizes[rank] = self.folder.log_path(int(rank)).stat().st_size if self.folder else 0
        return sizes

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        """More is known of what is run, or what comes of it: write it down."""
        if self.folder is not None:
            self.folder.add_facts(**facts)

    def record_reported(self, rank: int, kind: str, facts: dict[str, Any]) -> None:
        """Record an event that a rank reports; it cannot pass for an own one."""
        known = self.folder.run_json.facts["config"].items() if self.folder else ()
        if kind == CONFIG and all(item in known for item in facts["values"].items()):
            return  # another rank has said it
        kind = f"told: {kind}" if kind in OWN_KINDS else kind
        self._record(self._reported, kind, facts | {"rank": rank})

    def final_output(self, ranks: Iterable[int]) -> str:
        """The ends of some ranks' logs."""
        folder = self.folder
        return "\n".join(folder.final_output(rank) for rank in ranks) if folder else ""

    def since(self, at: float) -> tuple[RunEvent, ...]:
        """Return the events from a time on that are in memory."""
        events = sorted([*self._own_events, *self._reported], key=lambda event: event.at)
        return tuple(event for event in events if event.at >= at)

    def of_attempt(self, attempt: int) -> tuple[RunEvent, ...]:
        """Return the events since the start of an attempt that are in memory."""
        began = self._attempt_starts.get(attempt)
        return () if began is None else self.since(began)


def _shorten_fact(fact: Any) -> Any:
    """A fact in the length that it may have in memory."""
    if fact is None or isinstance(fact, int | float):
        return fact
    text = fact if isinstance(fact, str) else json.dumps(fact, default=str)
    return fact if len(text) <= MAX_FACT_CHARS else f"{text[:MAX_FACT_CHARS]} …"
