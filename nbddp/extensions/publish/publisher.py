"""Read new data from a run's folder and send it to a tracker."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

from nbddp.errors import RequestError
from nbddp.extensions.publish.step_aggregator import AggregatedStep, StepAggregator
from nbddp.extensions.publish.tracker import RunIdentity, RunOutcome, Tracker
from nbddp.extensions.runs.stored_run import UNREADABLE
from nbddp.extensions.runs.summary import summarize
from nbddp.record import run_events
from nbddp.record.json_lines import JsonLinesReader, Row
from nbddp.record.run_folder import new_facts, read_facts, write_atomic

STEPS_PER_CALL = 500  # small enough that each call of the tracker returns in time
MAX_LIVE_EVENTS = 1000  # events that a tracker gets while the run goes on
PREFIX = "nbddp."
PUBLISHED_FACTS = (
    *("world_size", "nproc", "backend_used", "devices", "device_names", "hosts", "cores"),
    *("host", "started", "python", "versions", "sweep", "scale"),
)


@dataclass
class Publisher:
    """Publishes a run; starts the tracker's run when there is something to publish.

    Attributes:
        folder: the folder of the run.
        tracker: the tracker to publish to.
        name, project: as in :class:`RunIdentity`.
        limit: returns a context manager that limits the tracker's time for an operation; called
            with the operation's name.
        is_live: whether the run goes on. If so, steps are published as soon as they are complete;
            otherwise, after the whole run was read.
        report_start: called with ``where`` when the tracker's run has started.
        where: the location of the run in the tracker; empty before its start.
        steps: the number of published steps.
    """

    folder: Path
    tracker: Tracker
    _: KW_ONLY
    name: str
    project: str
    limit: Callable[[str], AbstractContextManager[None]]
    is_live: bool
    report_start: Callable[[str], None]
    where: str = ""
    steps: int = 0

    def __post_init__(self) -> None:
        self.aggregator = StepAggregator()
        self._rows = JsonLinesReader(self.folder / "metrics.jsonl", "rank", "attempt")
        self._events = JsonLinesReader(self.folder / "events.jsonl", "kind")
        self._run_facts = new_facts()
        self._published_settings: dict[str, Any] = {}
        self._event_lines: list[tuple[float, str]] = []
        self._events_published = 0
        self._attempt = 0
        self._world_sizes: dict[int, int] = {}  # world sizes by attempt
        self._has_ended_cell = self._is_flush_due = False

    @property
    def has_stopped(self) -> bool:
        """Whether the ranks have stopped; in a restart, they start again at once."""
        return "ended" in self._run_facts

    def publish_new(self, *, is_over: bool = False) -> bool:
        """Read and publish new data; return whether there was any.

        Args:
            is_over: whether the files are complete.

        Raises:
            OSError: a file cannot be read.
            Exception: the tracker raised an error.
        """
        is_flush_due = self._is_flush_due or is_over
        rows: list[Row] = []
        with suppress(FileNotFoundError):  # no rank has reported anything yet
            rows = self._rows.read(is_over=is_over)
        # read after the rows, so that each row's cell is in it
        events = self._events.read(is_over=is_over)
        for row in events:
            with suppress(*UNREADABLE):  # a damaged line
                self._read_event(run_events.read_event(row))
        now = time.monotonic()
        for row in rows:
            self.aggregator.add(row, now)
        # the last rows of a cell that has ended are read in the next call at the latest
        self._is_flush_due = self._has_ended_cell
        self._has_ended_cell = False
        if self.is_live:
            is_rest = is_flush_due and not rows
            steps = self.aggregator.pop_complete(math.inf if is_rest else now)
            if steps or (self._event_lines and is_flush_due):
                self._publish(steps)
        return bool(rows or events)

    def finish(self) -> RunOutcome:
        """Publish the rest and the outcome of the run; return the outcome.

        Raises:
            Exception: the tracker raised an error.
        """
        while self.publish_new(is_over=True):
            pass
        self._publish(self.aggregator.pop_complete(math.inf))
        summary, facts = summarize(self.folder), read_facts(self.folder)
        names = ("steps", "restarts", "heals", "failures", "seconds_lost", "steps_per_second")
        totals = {each: facts[each] for each in names if isinstance(facts.get(each), int | float)}
        outcome = RunOutcome(
            outcome=summary.outcome,
            why=summary.why,
            is_live=summary.is_live,
            end_time=float(self._event_lines[-1][0]) if self._event_lines else time.time(),
            totals=totals,
            events=tuple(self._event_lines),
        )
        self._call_tracker("finish", self.tracker.finish, outcome)
        return outcome

    # ---- reading

    def _read_event(self, event: run_events.RunEvent) -> None:
        match event:
            case run_events.RanksStarted(attempt=attempt, world_size=size):
                self._world_sizes[attempt] = size
                self.aggregator.ranks = frozenset(range(size))
            case run_events.CellStarted(began=began, again=is_again):
                self.aggregator.begin_cell(float(began or event.time), is_again=is_again)
            case run_events.CellEnded():
                self._has_ended_cell = True
        if text := _describe_event(event):
            self._event_lines.append((event.time, text))
        event.apply(self._run_facts)

    # ---- publishing

    def _publish(self, steps: list[AggregatedStep]) -> None:
        settings = self._settings()
        if not self.where:
            began = float(self._event_lines[0][0]) if self._event_lines else time.time()
            run = RunIdentity(
                name=self.name, project=self.project, start_time=began, settings=dict(settings)
            )
            self._published_settings = settings
            self.where = self._call_tracker("start", self.tracker.start, run)
            self.report_start(self.where)
        published = self._published_settings
        new = {name: value for name, value in settings.items() if published.get(name) != value}
        if new:
            self._published_settings = published | new
            self._call_tracker("settings", self.tracker.update_config, new)
        for at, text in self._event_lines[self._events_published : MAX_LIVE_EVENTS]:
            self._call_tracker("event", self.tracker.log_event, at, text)
        self._events_published = min(len(self._event_lines), MAX_LIVE_EVENTS)
        for first in range(0, len(steps), STEPS_PER_CALL):
            marked = [self._with_attempt(step) for step in steps[first : first + STEPS_PER_CALL]]
            self._call_tracker("steps", self.tracker.log_steps, marked)
            self.steps += len(marked)

    def _with_attempt(self, step: AggregatedStep) -> AggregatedStep:
        """Add the attempt number and the world size to the first step of each attempt."""
        if step.attempt == self._attempt:
            return step
        self._attempt = step.attempt
        marks = {"nbddp/attempt": float(step.attempt)}
        if step.attempt in self._world_sizes:
            marks["nbddp/world_size"] = float(self._world_sizes[step.attempt])
        return replace(step, values={**step.values, **marks})

    def _settings(self) -> dict[str, Any]:
        facts = read_facts(self.folder)
        published = {name: facts[name] for name in PUBLISHED_FACTS if name in facts}
        published["run"] = self.folder.name
        git = facts.get("git")
        if isinstance(git, dict):
            published |= {f"git.{key}": git[key] for key in ("commit", "dirty") if key in git}
        ours = {f"{PREFIX}{name}": value for name, value in published.items()}
        settings = self._run_facts["config"] | ours
        return {name: _plain_value(value) for name, value in settings.items()}

    def _call_tracker(self, what: str, method: Callable[..., Any], *arguments: object) -> Any:
        with self.limit(what):
            return method(*arguments)


def _describe_event(event: run_events.RunEvent) -> str:
    """Return an event as a sentence; empty for settings, which trackers show as a config."""
    match event:
        case run_events.Configured():
            return ""
        case run_events.CellStarted(number=number, again=is_again):
            return f"cell {number} begins{' again' if is_again else ''}"
        case run_events.CellEnded(number=number, outcome=outcome):
            return f"cell {number}: {outcome}"
        case run_events.GroupStopped():
            return "stopped"
    return event.describe()


def _plain_value(value: Any) -> Any:
    """Return a number, text or bool unchanged; other values as JSON."""
    if value is None or isinstance(value, str | int | float):
        return value
    return json.dumps(value, default=str)


# ---- a note in the run's folder prevents publishing a run twice by mistake


def write_published(
    folder: Path, kind: str, *, name: str, is_whole: bool = False, **facts: Any
) -> None:
    """Write the note that a run was published, atomically.

    Raises:
        OSError: the note cannot be written.
    """
    facts = {"name": name, "is_whole": is_whole, **facts}
    write_atomic(folder / f"published-{kind}.json", json.dumps(facts) + "\n")


def read_published(folder: Path, kind: str) -> dict[str, Any]:
    """Return the note about a tracker; empty if the run was not published there."""
    return read_facts(folder, f"published-{kind}.json")


def name_in_tracker(folder: Path, kind: str, *, is_again: bool) -> str:
    """Return the name of a run in a tracker: that of its folder, with a number if repeated.

    Raises:
        RequestError: the run was published there before, and ``is_again`` is not set.
    """
    previous = read_published(folder, kind)
    if not previous:
        return folder.name
    if not is_again:
        state = "is" if previous.get("is_whole") else "is partly"
        raise RequestError(
            f"run {folder.name} {state} published to {kind} already "
            f"({previous.get('where', '?')}); use --again to publish it as another run"
        )
    base, dash, number = str(previous.get("name", "")).rpartition("-again")
    is_numbered = bool(dash) and base == folder.name and number.isdecimal()
    return f"{folder.name}-again{int(number) + 1 if is_numbered else 2}"
