"""The kinds of events in a run: a class for each, with its facts, its text and its effect.

To add a kind, write a class with a ``kind`` here. The notebook passes an event to
:meth:`EventLog.record`; a rank reports kind and facts, for a subclass of :class:`ReportedEvent`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields
from typing import Any, ClassVar

from nbddp.formatting import (
    cut_text,
    format_bytes,
    format_ranks,
    format_seconds,
    list_some,
    plural,
)
from nbddp.lifecycle.retries import RecoveryCost
from nbddp.record.heal.heal_report import HealFacts
from nbddp.record.run_folder import iso_time
from nbddp.wire.frozen import Frozen

MAX_NOT_CARRIED = 8  # variables in the text of a heal
MAX_SETTING = 40  # characters of a value in the text of a configuration
MAX_SETTINGS = 8  # in the text of a configuration; `run.json` has all

EVENT_CLASSES: dict[str, type[RunEvent]] = {}  # by kind


class RunEvent(Frozen):
    """An event in a run: a line of ``events.jsonl``.

    The other fields of a subclass are its facts, with the names that they have in the file. The
    file lacks a fact that has its default.

    Attributes:
        kind: the name of its class in the file.
        line: its text, with facts in braces; empty if the views show it in another way.
        mood: its colour in a list of events: ``bad``, ``warn``, or empty.
        defaults: the default of each fact; MISSING for a fact without a default.
        required: the facts without a default.
        time: when it happened, in ``time.time()``.
        other_facts: what the file of a later version knows about an event of this kind.
    """

    kind: ClassVar[str]
    line: ClassVar[str]
    mood: ClassVar[str]
    defaults: ClassVar[dict[str, Any]]
    required: ClassVar[set[str]]
    time: float = field(default_factory=lambda: time.time())
    other_facts: Mapping[str, Any] = field(default_factory=dict)

    def __init_subclass__(cls, *, kind: str = "", line: str = "", mood: str = "") -> None:
        super().__init_subclass__()
        cls.kind, cls.line, cls.mood = kind, line, mood
        cls.defaults = {f.name: f.default for f in fields(cls) if f.name not in _NOT_FACTS}
        cls.required = {name for name, default in cls.defaults.items() if default is MISSING}
        if kind:
            EVENT_CLASSES[kind] = cls

    def facts(self) -> dict[str, Any]:
        """Return its facts, as in the file."""
        facts = {name: getattr(self, name) for name in self.defaults}
        changed = {name: fact for name, fact in facts.items() if fact != self.defaults[name]}
        return {**changed, **self.other_facts}

    def describe(self) -> str:
        """Return its text in a list of events; empty if the views show it in another way."""
        return self.line.format_map(vars(self))

    def apply(self, run_facts: dict[str, Any]) -> None:
        """Update the facts of ``run.json``."""


_NOT_FACTS = frozenset({"kind", "time", "other_facts"})


def event_of(kind: str, facts: Mapping[str, Any], at: float) -> RunEvent:
    """Return the event of this kind with these facts.

    Raises:
        KeyError: an event of the notebook lacks a fact.
    """
    event_class = EVENT_CLASSES.get(kind, OtherEvent)
    missing = event_class.required - facts.keys()
    if missing and not issubclass(event_class, ReportedEvent):
        raise KeyError(min(missing))
    if missing:  # a rank may report anything
        event_class = OtherEvent
    values = {name: fact for name, fact in facts.items() if name in event_class.defaults}
    others = {name: fact for name, fact in facts.items() if name not in values}
    if event_class is OtherEvent:
        values["kind"] = kind
    return event_class(time=at, other_facts=others, **values)


def read_event(row: dict[str, Any]) -> RunEvent:
    """Return the event of a line of ``events.jsonl``.

    Raises:
        KeyError: it lacks a fact.
    """
    return event_of(row.pop("kind"), row, row.pop("time"))


def reported_event(rank: int, kind: str, facts: Mapping[str, Any]) -> RunEvent:
    """Return the event that a rank reports. It cannot imitate an event of the notebook."""
    if not issubclass(EVENT_CLASSES.get(kind, OtherEvent), ReportedEvent):
        kind = f"told: {kind}"
    return event_of(kind, {**facts, "rank": rank}, time.time())


# ---- attempts


class AttemptEvent(RunEvent):
    """An event of an attempt: 1, 2, 3 ... for each start of the ranks."""

    attempt: int


class RanksStarted(AttemptEvent, kind="start"):
    """The processes of the ranks were started."""

    world_size: int

    def describe(self) -> str:
        return f"{'restart' if self.attempt > 1 else 'start'}: attempt {self.attempt}"

    def apply(self, run_facts: dict[str, Any]) -> None:
        if "world_size" in run_facts:  # a run may start with attempt 2
            run_facts["restarts"] += 1
        run_facts["world_size"] = self.world_size
        run_facts.pop("ended", None)


class StartFailed(RunEvent, kind="start failed", line="start failed: {reason}", mood="bad"):
    """The ranks could not start; ``interrupted``: because the user stopped them."""

    reason: str
    interrupted: bool

    def apply(self, run_facts: dict[str, Any]) -> None:
        reason = self.reason.partition("\n")[0]
        outcome = reason if self.interrupted else f"start failed: {reason}"
        run_facts.update({"outcome": outcome, "interrupted": self.interrupted})


class RanksReady(AttemptEvent, kind="ready"):
    """All ranks are ready."""


class GroupRejoined(AttemptEvent, kind="taken back"):
    """A notebook took back the ranks of one that was killed or restarted.

    ``pid``: the process of the new notebook. Older records have neither ``pid`` nor ``at``.
    """

    ranks: Sequence[int]
    world_size: int
    pid: int | None = None
    at: float | None = None

    def describe(self) -> str:
        ranks = f"{format_ranks(self.ranks)} of {self.world_size}"
        return f"{ranks} taken back from a notebook that was killed or restarted"

    def apply(self, run_facts: dict[str, Any]) -> None:
        if self.pid is not None:
            run_facts.update({"pid": self.pid, "taken_back": self.at})
            run_facts.pop("ended", None)


class GroupStopped(AttemptEvent, kind="stopped"):
    """All ranks have ended."""

    def apply(self, run_facts: dict[str, Any]) -> None:
        run_facts["ended"] = iso_time(self.time)


# ---- cells


class CellEvent(RunEvent):
    """The start or the end of a cell.

    Attributes:
        number: the number in the prompt of the notebook.
        id: the number in the group. Older records have neither ``id`` nor ``logs``.
        logs: the bytes in the log of each rank.
    """

    number: int
    id: int | None = None
    logs: Mapping[str, int] | None = None


class CellStarted(CellEvent, kind="cell"):
    """A cell was sent to its ranks.

    Attributes:
        began: when it began: before this event, because ranks may report at once. Older records
            have none.
        again: whether nbddp ran the cell again, in a recovery or a replay.
        replay: whether this was a replay.
    """

    ranks: Sequence[int]
    source: str
    began: float | None = None
    again: bool = False
    replay: bool = False


class CellEnded(CellEvent, kind="cell ended"):
    """A cell ended on all its ranks.

    Attributes:
        outcome: ``ok``, or the reason of the end in one line.
        report: the full report of a failure.
        failures: ``ranks``, ``what`` and ``consequence`` of each failure. Older records have none.
        interrupted: whether the user ended the cell.
    """

    outcome: str
    report: str = ""
    failures: Sequence[Mapping[str, Any]] = ()
    interrupted: bool = False

    def apply(self, run_facts: dict[str, Any]) -> None:
        run_facts.update({"outcome": self.outcome, "interrupted": self.interrupted})
        if self.outcome != "ok" and not self.interrupted:
            run_facts["failures"] += 1


class TrialEnded(RunEvent, kind="trial ended", line="{outcome}"):
    """The user ended a run of a sweep or a scaling before its cell ended."""

    outcome: str

    def apply(self, run_facts: dict[str, Any]) -> None:
        # the cells that ended before were only replayed
        run_facts.update({"outcome": self.outcome, "interrupted": True})


class NoProgress(RunEvent, kind="no progress", mood="warn"):
    """No rank of a cell makes progress."""

    text: str

    def describe(self) -> str:
        return self.text.partition("\n")[0].rstrip(":")


# ---- requests of the user


class InterruptAsked(RunEvent, kind="interrupt", line="interrupt requested", mood="warn"):
    """The user interrupted a cell."""


class RestartAsked(RunEvent, kind="restart asked", line="restart requested", mood="warn"):
    """The user restarted the group during a cell."""


class StopAsked(RunEvent, kind="stop asked", line="stop requested", mood="warn"):
    """The user stopped the group during a cell."""


class KillAsked(RunEvent, kind="kill asked", line="kill requested for rank {rank}", mood="warn"):
    """The user killed a rank."""

    rank: int


# ---- failures and recoveries


class RankFailed(RunEvent, kind="failure", mood="bad"):
    """A cell failed on a rank; in a view also on ``other_ranks``, with the same text."""

    rank: int
    what: str
    other_ranks: Sequence[int] = ()

    def describe(self) -> str:
        return f"{format_ranks([self.rank, *self.other_ranks])}: {self.what}"


class RankExited(AttemptEvent, kind="exit", line="rank {rank} {how}", mood="bad"):
    """The process of a rank ended unexpectedly; ``how`` in words."""

    rank: int
    how: str


class Recovered(AttemptEvent, RecoveryCost, kind="recovery"):
    """The ranks of a failed cell were healed or restarted."""

    def describe(self) -> str:
        return f"recovery: {self}"


class Resumed(RunEvent, RecoveryCost, kind="resumed"):
    """The first step after a failure, ``seconds`` after it.

    ``lost``: the steps that ran a second time; None if unknown.
    """

    step: float
    lost: int | None
    seconds: float

    def describe(self) -> str:
        lost = "" if self.lost is None else f", {plural(self.lost, 'step')} lost"
        after = f"{format_seconds(self.seconds)} after the failure"
        return f"resumed at step {self.step:g}, {after}{lost} ({self})"

    def apply(self, run_facts: dict[str, Any]) -> None:
        run_facts["seconds_lost"] = round(run_facts["seconds_lost"] + self.seconds, 3)


class RanksHealed(RunEvent, HealFacts, kind="healed"):
    """Dead ranks were replaced.

    ``more_places``: number of places that the file lacks; ``bytes``: number of carried bytes.
    """

    bytes: int
    more_places: int

    def describe(self) -> str:
        names = list_some([*self.left], MAX_NOT_CARRIED, more=sum(self.more.values()))
        return (
            f"{format_ranks(self.ranks)} healed with the variables of rank {self.donor}: "
            f"forked in {self.fork:.2f} s, {format_bytes(self.bytes)} packed in "
            f"{self.carry:.2f} s, joined in {self.meet:.2f} s"
        ) + (f"; not carried: {names}" if names else "")

    def apply(self, run_facts: dict[str, Any]) -> None:
        run_facts["heals"] += 1


class HealFailed(RunEvent, kind="not healed", line="not healed: {reason}", mood="bad"):
    """Dead ranks could not be replaced."""

    reason: str


class NodeChanged(RunEvent, kind="node", line="{what}"):
    """A node joined, left or was lost; ``what`` says it."""

    what: str


# ---- reports of ranks


class ReportedEvent(RunEvent):
    """An event that a rank reports; without a rank if it is no event of nbddp."""

    rank: int | None = None

    @property
    def prefix(self) -> str:
        """The rank, to begin a text."""
        return "" if self.rank is None else f"rank {self.rank}: "


class OtherEvent(ReportedEvent):
    """An event of a kind without a class, such as one of the user or of a later version.

    Its facts are in ``other_facts``.
    """

    kind: str  # type: ignore[misc]  # all other classes have one kind

    def describe(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self.other_facts.items())
        return f"{self.prefix}{self.kind}" + (f" ({facts})" if facts else "")


class Configured(ReportedEvent, kind="config"):
    """A rank called ``nbddp.config``."""

    values: Mapping[str, Any]

    def describe(self) -> str:
        shown = {name: cut_text(str(value), MAX_SETTING) for name, value in self.values.items()}
        texts = [f"{name} {text}" for name, text in shown.items()]
        return f"config: {list_some(texts, MAX_SETTINGS)}"

    def apply(self, run_facts: dict[str, Any]) -> None:
        before, new = run_facts["config"], self.values
        run_facts["config"] = {**before, **new} if self.rank == 0 else {**new, **before}


class FaultFired(ReportedEvent, kind="fault", line="fault: {fault}", mood="warn"):
    """A fault was injected."""

    fault: str
    at_step: int | None = None


class CheckpointSaved(ReportedEvent, kind="checkpoint"):
    """A rank saved a checkpoint, in ``seconds``."""

    step: int
    seconds: float

    def describe(self) -> str:
        is_number = isinstance(self.seconds, int | float)  # a rank may report anything
        duration = format_seconds(self.seconds) if is_number else self.seconds
        return f"{self.prefix}checkpoint of step {self.step}, {duration}"


class CheckpointLoaded(ReportedEvent, kind="resume"):
    """A rank resumed from a checkpoint."""

    step: int

    def describe(self) -> str:
        return f"{self.prefix}resumes from the checkpoint of step {self.step}"
