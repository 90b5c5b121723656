"""What happened to a worker group, and when: for the time line, and in the run folder."""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbddp.record.folder import RunFolder

OWN_KINDS = frozenset(
    {
        *("start", "start failed", "ready", "stopped", "exit", "failure", "no progress"),
        *("cell", "cell ended", "interrupt", "restart asked", "stop asked", "kill asked"),
        *("recovery", "resumed", "healed", "not healed", "node", "taken back"),
    }
)
CONFIG = "config"
MAX_EVENTS = 200  # of each kind are kept for the time line; the file has all
MAX_KINDS = 50  # kinds that are kept apart; a loop that makes up names has the rest in common
MAX_FACT = 4000  # characters of a fact that are kept here


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that happened, at a time of ``time.time()``."""

    at: float
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)


def with_failures_once(events: Iterable[Happening], *, told: str = "") -> tuple[Happening, ...]:
    """The same events, but a failure that several ranks had one after the other is one event.

    What is ``told`` already, as the first cause, is not told again.
    """
    shown: list[Happening] = []
    for is_failure, run in itertools.groupby(events, lambda event: event.kind == "failure"):
        if not is_failure:
            shown += run
            continue
        by_news: dict[str, list[Happening]] = {}
        for event in run:
            by_news.setdefault(str(event.facts.get("what", "")), []).append(event)
        shown += (_joined(what, of_ranks, told) for what, of_ranks in by_news.items())
    return tuple(shown)


def _joined(what: str, events: list[Happening], told: str) -> Happening:
    if len(events) == 1:
        return events[0]
    facts = {
        "ranks": sorted(event.facts["rank"] for event in events),
        "what": "failed" if what == told else what,
    }
    return Happening(events[0].at, "failure", facts)


class TimeLine:
    """The record of one worker group's runs; ``say`` tells the user what cannot be written."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.folder: RunFolder | None = None
        self.path: Path | None = None  # of the run, or of the one that ended last
        self._say = say
        # by kind: many checkpoints do not push out the start, which the time line is cut by
        self._events: dict[str, deque[tuple[int, Happening]]] = {}
        self._numbers = itertools.count()

    def open(self, base: Path, name: str, facts: Mapping[str, Any]) -> RunFolder:
        """The folder of the run below ``base``, made when there is none or somebody deleted it.

        ``facts`` say what was started; they stand in its ``run.json``.
        """
        if self.folder is not None and not self.folder.path.exists():
            self.close()
        if self.folder is None:
            self.folder = RunFolder(base, name)
            self.path = self.folder.path
            for remark in (self.folder.remark, self.folder.describe(**facts)):
                self.tell(remark)
        return self.folder

    def go_on(self, path: Path, begin: Callable[[], RunFolder]) -> RunFolder:
        """Go on in the folder of another notebook's run; if it is gone, in a new one."""
        if path.is_dir():
            self.close()
            self.folder, self.path = RunFolder(path, is_there=True), path
        return self.folder or begin()

    def close(self) -> None:
        """The run is over."""
        folder, self.folder = self.folder, None  # first: a descriptor that is closed may be reused
        if folder is not None:
            folder.close()

    def record(self, kind: str, /, **facts: Any) -> None:
        """Something happened now."""
        event = Happening(time.time(), kind, {name: _short(fact) for name, fact in facts.items()})
        self._of_kind(kind).append((next(self._numbers), event))
        if self.folder is not None:
            self.tell(self.folder.event(kind, **facts))

    def sizes_of_logs(self, ranks: Iterable[int]) -> dict[str, int]:
        """How many bytes each rank has written; a cell's part of its log begins or ends there."""
        folder = self.folder
        return {str(rank): folder.size_of_log(rank) for rank in ranks} if folder else {}

    def _of_kind(self, kind: str) -> deque[tuple[int, Happening]]:
        if kind not in self._events and kind not in OWN_KINDS and len(self._events) >= MAX_KINDS:
            kind = "and other kinds"
        return self._events.setdefault(kind, deque(maxlen=MAX_EVENTS))

    def describe(self, facts: Mapping[str, Any]) -> None:
        """More is known of what is run, or what comes of it: write it down."""
        if self.folder is not None:
            self.tell(self.folder.describe(**facts))

    def note(self, rank: int, kind: str, facts: dict[str, Any]) -> None:
        """Something that a rank says has happened; it cannot pass for one of our own events."""
        if kind == CONFIG and self.folder and self.folder.description.has_config(facts["values"]):
            return  # another rank has said it
        self.record(f"told: {kind}" if kind in OWN_KINDS else kind, **(facts | {"rank": rank}))

    def last_words(self, ranks: Iterable[int]) -> str:
        """The ends of some ranks' logs."""
        folder = self.folder
        return "\n".join(folder.last_words(rank) for rank in ranks) if folder else ""

    def since(self, at: float) -> tuple[Happening, ...]:
        """What happened from then on, as far as it is kept."""
        kept = [pair for events in tuple(self._events.values()) for pair in tuple(events)]
        return tuple(event for _, event in sorted(kept, key=_number) if event.at >= at)

    def of_attempt(self, attempt: int) -> tuple[Happening, ...]:
        """What happened since this attempt was started, as far as it is kept."""
        starts = [event for _, event in tuple(self._events.get("start", ()))]
        of_it = [event for event in starts if event.facts["attempt"] == attempt]
        return self.since(of_it[0].at) if of_it else ()

    def tell(self, remark: str) -> None:
        """Tell the user something of the record."""
        if remark:
            self._say(remark)


def _number(numbered: tuple[int, Happening]) -> int:
    return numbered[0]


def _short(fact: Any) -> Any:
    """A fact in the length that it may have in memory."""
    if fact is None or isinstance(fact, int | float):
        return fact
    text = fact if isinstance(fact, str) else json.dumps(fact, default=str)
    return fact if len(text) <= MAX_FACT else f"{text[:MAX_FACT]} …"
