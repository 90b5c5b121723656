"""A run's folder on one side, a tracker on the other: whatever is new goes across."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nbddp.archive.summary import UNREADABLE, summarize
from nbddp.errors import RequestError
from nbddp.publish.step_aggregator import AggregatedStep, StepAggregator
from nbddp.publish.tracker import PublishError, RunIdentity, RunOutcome, Tracker
from nbddp.record.event_log import RunEvent
from nbddp.record.json_lines import JsonLinesReader, Row
from nbddp.record.run_folder import read_facts, write_atomic
from nbddp.ui.wording import describe_event

STEPS_PER_CALL = 500  # that a tracker is given: it has to answer now and then
MAX_LIVE_EVENTS = 1000  # happenings that a tracker is told of as they come
PREFIX = "nbddp."
PUBLISHED_FACTS = (
    *("world_size", "nproc", "backend_used", "devices", "device_names", "hosts", "cores"),
    *("host", "started", "python", "versions", "sweep", "scale"),
)


class Publisher:
    """Takes a run across; makes the tracker's run when there is something to say of it.

    Args:
        folder: the run's.
        tracker: where to.
        name, place: as for :class:`RunIdentity`.
        is_live: whether the run goes on: then steps are published when they are complete, else
            when all of the run was read.
        limit: limits the time in which the tracker must answer; called with what it is asked.
    """

    def __init__(
        self,
        folder: Path,
        tracker: Tracker,
        *,
        name: str,
        project: str,
        limit: Callable[[str], AbstractContextManager[None]],
        is_live: bool,
    ) -> None:
        self._folder = folder
        self._tracker = tracker
        self._name, self._project = name, project
        self._time_limit = limit
        self._is_live = is_live
        self._rows = JsonLinesReader(folder / "metrics.jsonl", "rank", "attempt")
        self._events = JsonLinesReader(folder / "events.jsonl", "kind")
        self._steps = StepAggregator()
        self._config: dict[str, Any] = {}
        self._published_settings: dict[str, Any] = {}
        self._event_lines: list[tuple[float, str]] = []
        self._events_published = 0
        self._attempt = 0
        self._world_sizes: dict[int, int] = {}  # world sizes by attempt
        self._published_from = -math.inf  # numbers of cells before are not published
        self._has_ended_cell = self._is_flush_due = False
        self.where = ""
        self.steps = 0

    @property
    def late(self) -> int:
        """Values that came after their step was published, and are not."""
        return self._steps.late

    def publish_new(self, *, is_over: bool = False) -> bool:
        """Take across what is new; whether there was anything to read.

        Args:
            is_over: nothing more will be written.

        Raises:
            OSError: a file cannot be read.
            Exception: whatever the tracker raises.
        """
        is_flush_due = self._is_flush_due or is_over
        rows = _new_rows(self._rows, is_over=is_over)
        events = _new_rows(self._events, is_over=is_over)  # after the rows, whose cells are in it
        for event in events:
            with suppress(*UNREADABLE):  # a line of somebody else's
                self._read_event(event)
        now = time.monotonic()
        for row in rows:
            if row["time"] >= self._published_from:
                self._steps.add(row, now)
        # the rows that a cell wrote before its end are read in the next turn, at the latest
        self._is_flush_due = self._has_ended_cell
        self._has_ended_cell = False
        if self._is_live:
            is_rest = is_flush_due and not rows
            steps = self._steps.pop_complete(math.inf if is_rest else now)
            if steps or (self._event_lines and is_flush_due):
                self._publish(steps)
        return bool(rows or events)

    def finish(self) -> RunOutcome:
        """All that is left, and what came of it.

        Raises:
            Exception: whatever the tracker raises.
        """
        while self.publish_new(is_over=True):
            pass
        self._publish(self._steps.pop_complete(math.inf))
        summary, facts = summarize(self._folder), read_facts(self._folder)
        names = ("steps", "restarts", "heals", "failures", "seconds_lost", "steps_per_second")
        outcome = RunOutcome(
            outcome=summary.outcome,
            why=summary.why,
            is_live=summary.is_live,
            end_time=float(self._event_lines[-1][0]) if self._event_lines else time.time(),
            totals={
                each: facts[each] for each in names if isinstance(facts.get(each), int | float)
            },
            events=tuple(self._event_lines),
        )
        self._call_tracker("finish", partial(self._tracker.finish, outcome))
        return outcome

    # ---- reading

    def _read_event(self, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "start":
                self._world_sizes[event["attempt"]] = size = int(event["world_size"])
                self._steps.ranks = frozenset(range(size))
            case "cell":
                when, is_again = (
                    float(event.get("began", event["time"])),
                    event.get("again") is True,
                )
                self._steps.begin_cell(when, is_again=is_again)
                may_be_replay = is_again and self._published_from == -math.inf
                # a run of a sweep, or of a scaling, is its last cell: others are replayed before
                if may_be_replay and {"sweep", "scale"} & read_facts(self._folder).keys():
                    self._published_from = math.inf
                elif not is_again and self._published_from == math.inf:
                    self._published_from = when
            case "cell ended":
                self._has_ended_cell = True
            case "config":
                known, values = self._config, dict(event["values"])
                self._config = known | values if event.get("rank") == 0 else values | known
        facts = {name: value for name, value in event.items() if name not in ("time", "kind")}
        if text := _describe_event(RunEvent(event["time"], event["kind"], facts)):
            self._event_lines.append((event["time"], text))

    # ---- telling

    def _publish(self, steps: list[AggregatedStep]) -> None:
        settings = self._settings()
        if not self.where:
            began = float(self._event_lines[0][0]) if self._event_lines else time.time()
            run = RunIdentity(
                name=self._name, project=self._project, start_time=began, settings=dict(settings)
            )
            self._published_settings = settings
            self.where = self._call_tracker("begin", partial(self._tracker.start, run))
        new = {
            name: value
            for name, value in settings.items()
            if self._published_settings.get(name) != value
        }
        if new:
            self._published_settings = self._published_settings | new
            self._call_tracker("settings", partial(self._tracker.update_config, new))
        for when, text in self._event_lines[self._events_published : MAX_LIVE_EVENTS]:
            self._call_tracker("record", partial(self._tracker.log_event, when, text))
        self._events_published = min(len(self._event_lines), MAX_LIVE_EVENTS)
        for first in range(0, len(steps), STEPS_PER_CALL):
            marked = [self._with_attempt(step) for step in steps[first : first + STEPS_PER_CALL]]
            self._call_tracker("steps", partial(self._tracker.log_steps, marked))
            self.steps += len(marked)

    def _with_attempt(self, step: AggregatedStep) -> AggregatedStep:
        """The first step of each attempt says which one it is, and how many ranks it has."""
        if step.attempt == self._attempt:
            return step
        self._attempt = step.attempt
        marks = {"nbddp/attempt": float(step.attempt)}
        if step.attempt in self._world_sizes:
            marks["nbddp/world_size"] = float(self._world_sizes[step.attempt])
        return replace(step, values={**step.values, **marks})

    def _settings(self) -> dict[str, Any]:
        facts = read_facts(self._folder)
        ours = {
            f"{PREFIX}{name}": _plain_value(facts[name])
            for name in PUBLISHED_FACTS
            if name in facts
        }
        ours[f"{PREFIX}run"] = self._folder.name
        git = facts.get("git")
        if isinstance(git, dict):
            ours |= {f"{PREFIX}git.{key}": git[key] for key in ("commit", "dirty") if key in git}
        return {**{name: _plain_value(value) for name, value in self._config.items()}, **ours}

    def _call_tracker(self, what: str, call: Callable[[], Any]) -> Any:
        with self._time_limit(what):
            try:
                return call()
            except PublishError:
                raise
            except Exception as error:
                text = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
                raise PublishError(text) from error


def _new_rows(reader: JsonLinesReader, *, is_over: bool) -> list[Row]:
    try:
        return reader.read(is_over=is_over)
    except FileNotFoundError:  # nothing was reported yet
        return []


def _describe_event(event: RunEvent) -> str:
    """Return an event as a sentence; empty for settings, for which trackers have a place."""
    match event.kind:
        case "config":
            return ""
        case "cell":
            again = " again" if event.facts.get("again") else ""
            return f"cell {event.facts['number']} begins{again}"
        case "cell ended":
            return f"cell {event.facts['number']}: {event.facts['outcome']}"
        case "stopped":
            return "stopped"
    return describe_event(event)


def _plain_value(value: Any) -> Any:
    """A number, a text, a truth; of what has parts, its JSON."""
    if value is None or isinstance(value, str | int | float):
        return value
    return json.dumps(value, default=str)


# ---- that a run was published, noted in its folder: it is not published there twice unasked


def write_note(folder: Path, kind: str, *, name: str, is_whole: bool = False, **facts: Any) -> None:
    """Write down where it is; whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    facts = {"name": name, "is_whole": is_whole, **facts}
    write_atomic(folder / f"published-{kind}.json", json.dumps(facts) + "\n")


def read_note(folder: Path, kind: str) -> dict[str, Any]:
    """What was noted; empty if nothing was published there."""
    try:
        facts = json.loads((folder / f"published-{kind}.json").read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def name_in_tracker(folder: Path, kind: str, *, is_again: bool) -> str:
    """What a run is called in a tracker: like its folder; once more, with a number behind it.

    Raises:
        RequestError: it is there already.
    """
    previous = read_note(folder, kind)
    if not previous:
        return folder.name
    if not is_again:
        state = "is" if previous.get("is_whole") else "began to be"
        raise RequestError(
            f"run {folder.name} {state} published to {kind} already "
            f"({previous.get('where', '?')}); --again makes another run of it there"
        )
    base, dash, number = str(previous.get("name", "")).rpartition("-again")
    is_numbered = bool(dash) and base == folder.name and number.isdecimal()
    return f"{folder.name}-again{int(number) + 1 if is_numbered else 2}"
