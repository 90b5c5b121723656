"""Summarize a run from as few of its files as possible, and tell how it ended."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from nbddp.errors import RequestError
from nbddp.extensions.runs.stored_run import UNREADABLE, StoredRun, damaged
from nbddp.record.metrics import Pairs
from nbddp.record.run_folder import new_facts, read_facts

STOPPED = "stopped"
RUNNING = "still running"
KILLED = "its kernel ended before it could record the end"
UNKNOWN = "its end is not recorded: its kernel was killed, or still runs"
NOTE_FILE = "marks.json"  # the user's note


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The summary of a run.

    Attributes:
        began: start in ``time.time()``; 0 if unknown.
        started_by: file name of its notebook or script; empty if unknown.
        ranks: world size when ranks last started; 0 if unknown.
        outcome: of the last cell ``ok``, ``failed``, ``interrupted`` or ``running``; ``empty``
            without a cell; ``killed`` or ``not recorded`` if the record has no end.
        why: the failure, or the position of an interrupt.
        last: for each metric, the mean over the ranks of their last values.
        curves: for each metric, (lowest, highest) values of consecutive parts of the run.
        is_live: whether its ranks are alive, as far as this machine knows.
        note: the user's note.
        size: size of its folder in bytes.
    """

    path: Path
    began: float = 0.0
    started_by: str = ""
    ranks: int = 0
    outcome: str = ""
    is_live: bool = False
    why: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, Pairs] = field(default_factory=dict)
    steps: int | None = None
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    seconds_lost: float = 0.0
    note: str = ""
    size: int = 0

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name


def summarize(path: Path, *, current: Path | None = None) -> Summary:
    """Summarize a run; ``current`` is the folder of this kernel's running run.

    Raises:
        RequestError: the run is damaged, or the folder holds no run.
    """
    try:
        return _summarize(path, current)
    except FileNotFoundError as error:
        raise RequestError(f"{path.name} has no {Path(error.filename or '').name}") from None
    except UNREADABLE as error:
        raise damaged(path, error) from None


def _summarize(path: Path, current: Path | None) -> Summary:
    (path / "events.jsonl").stat()
    facts = read_facts(path)
    if "ended" not in facts:
        facts = {**facts, **_facts_of_events(path)}
    is_live, outcome, why = _outcome(path, facts, current)
    pace, batch = facts.get("steps_per_second"), facts.get("samples_per_step")
    return Summary(
        path=path,
        began=_began(facts),
        started_by=str(facts.get("started_by", "")),
        ranks=int(facts.get("world_size") or facts.get("nproc") or 0),
        outcome=outcome,
        is_live=is_live,
        why=why,
        config=dict(facts.get("config", {})),
        last={name: float(each["mean"]) for name, each in facts.get("last", {}).items()},
        curves={
            name: [(float(low), float(high)) for low, high in pairs]
            for name, pairs in facts.get("curves", {}).items()
        },
        steps=None if facts.get("steps") is None else int(facts["steps"]),
        steps_per_second=None if pace is None else float(pace),
        samples_per_second=float(pace * batch) if pace and batch else None,
        seconds_lost=float(facts.get("seconds_lost", 0.0)),
        note=read_note(path),
        size=folder_size(path),
    )


def _facts_of_events(path: Path) -> dict[str, Any]:
    """Return the facts in the events of a run without an end: they are newer than ``run.json``."""
    run, facts = StoredRun(path), new_facts()
    for event in run.events:
        event.apply(facts)
    began = run.events[0].time if run.events else 0.0
    is_busy = bool(run.cells) and not run.cells[-1].is_over
    sizes = {"world_size": len(run.ranks)} if run.ranks else {}
    running_cell = run.cells[-1].number if is_busy else None
    return facts | sizes | {"began": began, "running_cell": running_cell}


def _outcome(path: Path, facts: Mapping[str, Any], current: Path | None) -> tuple[bool, str, str]:
    """Return whether the run is running, its outcome, and the reason."""
    recorded, is_live = str(facts.get("outcome", "")), False
    if "ended" not in facts:
        is_ours = current is not None and path.resolve() == current.resolve()
        ending = RUNNING if is_ours else describe_unended(facts, began=_began(facts))
        is_live, cell = ending == RUNNING, facts["running_cell"]
        if not is_live:
            outcome = "killed" if ending == KILLED else "not recorded"
            if cell is not None:  # the recorded outcome is that of an earlier cell
                return False, outcome, f"cell [{cell}] was running"
            return False, outcome, "" if recorded == "ok" else recorded
        if cell is not None:
            return True, "running", ""
    if recorded in ("", "ok"):
        return is_live, recorded or "empty", ""
    return is_live, "interrupted" if facts.get("interrupted") else "failed", recorded


def _began(facts: Mapping[str, Any]) -> float:
    if "began" in facts:
        return float(facts["began"])
    with suppress(ValueError, TypeError):
        return datetime.fromisoformat(facts["started"]).timestamp()
    return 0.0


def read_note(path: Path) -> str:
    """Return the user's note about a run; empty if there is none."""
    return str(read_facts(path, NOTE_FILE).get("note", ""))


def folder_size(path: Path) -> int:
    """Return the bytes of the readable files in a run folder."""
    total = 0
    for file in path.rglob("*"):
        with suppress(OSError):
            total += file.lstat().st_size
    return total


def value_of(summary: Summary, name: str) -> Any:
    """Return a run's value of a column, setting or metric; None if it has none.

    >>> run = Summary(path=Path("x"), config={"lr": 0.1}, last={"loss": 2.0}, ranks=4)
    >>> [value_of(run, name) for name in ("lr", "loss", "ranks", "size", "odd")]
    [0.1, 2.0, 4, 0, None]
    """
    if name in summary.config:
        return summary.config[name]
    if name in summary.last:
        return summary.last[name]
    column = SHORT_COLUMNS.get(name, name)
    return getattr(summary, column) if column in COLUMNS else None


COLUMNS = frozenset(
    {"name", "began", "started_by", "ranks", "outcome", "note", "size"}
    | {"steps", "steps_per_second", "samples_per_second", "seconds_lost"}
)
SHORT_COLUMNS = {"when": "began", "steps/s": "steps_per_second", "disk": "size"}


def is_number(value: object) -> bool:
    """Return whether a value can be sorted as a number, so it is not NaN."""
    return isinstance(value, int | float) and not math.isnan(value)


# ---- how it ended


def describe_run_end(run: StoredRun, *, current: Path | None) -> str:
    """Describe how a run ended; ``current`` is the folder of this kernel's running run, if any."""
    if run.was_stopped:
        return STOPPED
    if run.path == current:
        return RUNNING
    return describe_unended(run.facts, began=run.events[0].time if run.events else 0.0)


def describe_unended(facts: Mapping[str, Any], *, began: float) -> str:
    """Tell whether the kernel of a run without an end is alive; ``began`` as ``time.time()``."""
    pid, host = facts.get("pid"), facts.get("host")
    began = facts.get("taken_back", began)
    if not isinstance(pid, int) or host != platform.node():
        return UNKNOWN
    with suppress(psutil.Error, ValueError):
        process = psutil.Process(pid)
        is_dead = process.status() == psutil.STATUS_ZOMBIE  # its parent has not read the exit code
        if not is_dead and process.create_time() <= began:  # it is older than the run
            return RUNNING
    return KILLED
