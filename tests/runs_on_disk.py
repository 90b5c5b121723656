"""Run folders on disk, written without ranks: complete, killed, old, damaged."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbddp.record.metrics import MetricStore, RunTotals

BEGAN = 1_800_000_000.0  # in ``time.time()``
STARTED = "2027-01-15T08:00:00+0000"


def rows_of(
    steps: int, *, ranks: int = 2, pace: float = 10.0, begin: float = 2.0, attempt: int = 1
) -> list[dict[str, Any]]:
    """Return metric rows of ranks with a falling loss that differs a little by rank."""
    return [
        {
            "time": BEGAN + 1 + step / pace + rank / 1000,
            "rank": rank,
            "attempt": attempt,
            "step": step,
            "loss": begin * math.exp(-step / 50) + 0.01 * rank,
            "accuracy": 1 - math.exp(-step / 30),
        }
        for step in range(steps)
        for rank in range(ranks)
    ]


def events_of(
    *cells: tuple[str, str], ranks: int = 2, is_stopped: bool = True, seconds: float = 10.0
) -> list[dict[str, Any]]:
    """Return the events of a run whose cells have these sources and outcomes ("": running)."""
    found: list[dict[str, Any]] = [
        {"attempt": 1, "world_size": ranks, "time": BEGAN, "kind": "start"},
        {"attempt": 1, "time": BEGAN + 0.1, "kind": "ready"},
    ]
    for number, (source, outcome) in enumerate(cells, start=1):
        at = BEGAN + 1 + (number - 1) * seconds
        begun = {"number": number, "ranks": [*range(ranks)], "source": source}
        found.append({**begun, "time": at, "kind": "cell"})
        if outcome:
            ended = {"number": number, "outcome": outcome, "time": at + seconds}
            found.append({**ended, "kind": "cell ended"})
    if is_stopped:
        end = BEGAN + 1 + len(cells) * seconds
        found.append({"attempt": 1, "time": end, "kind": "stopped"})
    return found


def facts_of(
    cells: Sequence[tuple[str, str]], rows: Sequence[Mapping[str, Any]], **more: Any
) -> dict[str, Any]:
    metrics = MetricStore()
    for row in rows:
        values = {
            name: row[name] for name in row if name not in ("time", "rank", "attempt", "step")
        }
        metrics.add(row["rank"], row["time"], row.get("step"), values)
    facts: dict[str, Any] = {
        "format": 2,
        "started": STARTED,
        "ended": STARTED,
        "nproc": 2,
        "world_size": 2,
        "backend": "auto",
        "backend_used": "gloo",
        "devices": ["cpu", "cpu"],
        "versions": {"nbddp": "0.1.0", "torch": "2.13.0"},
        "host": "elsewhere",
        "pid": 1,
        "outcome": cells[-1][1] if cells else "",
        "config": {},
        "restarts": 0,
        "heals": 0,
        "failures": 0,
        "seconds_lost": 0.0,
    }
    return facts | RunTotals().facts(metrics) | more


def lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def make_run(
    base: Path,
    name: str = "20270115-080000-digits",
    *,
    cells: Sequence[tuple[str, str]] = (("train()", "ok"),),
    rows: Sequence[Mapping[str, Any]] | None = None,
    is_stopped: bool = True,
    torn: str = "",
    extra: Sequence[Mapping[str, Any]] = (),
    **facts: Any,
) -> Path:
    """Write a run folder below ``base``. ``facts`` extend its ``run.json``."""
    path = base / ".nbddp" / "runs" / name
    path.mkdir(parents=True)
    recorded = rows_of(60) if rows is None else rows
    events = sorted(
        [*events_of(*cells, is_stopped=is_stopped), *extra], key=lambda each: each["time"]
    )
    (path / "events.jsonl").write_text(lines(events))
    (path / "metrics.jsonl").write_text(lines(recorded) + torn)
    (path / "run.json").write_text(json.dumps(facts_of(cells, recorded, **facts)))
    (path / "rank0.log").write_text("hello\n")
    return path


# ---- a run whose second cell fails, with the output of each cell in the log of rank 0

STAMP = "20260102-030405"
LOG = "first of cell 1\nsecond of cell 1\nfirst of cell 2\n"
WROTE = LOG.index("first of cell 2")  # bytes of cell 1
WHAT = "ZeroDivisionError: <b>"
REPORT = f"rank 1: {WHAT}, line 3\n\n----> 1/0"
_ON = {"kind": "cell", "ranks": [0, 1]}
_ENDED = {"kind": "cell ended", "number": 7, "outcome": f"rank 1: {WHAT}", "report": REPORT}
FAILED: list[dict[str, Any]] = [
    {"time": 100.0, "kind": "start", "attempt": 1, "world_size": 2},
    {"time": 101.0, **_ON, "number": 1, "source": "# why\ntrain()", "logs": {"0": 0, "1": 0}},
    {"time": 103.0, "kind": "cell ended", "number": 1, "outcome": "ok", "logs": {"0": WROTE}},
    {"time": 104.0, **_ON, "number": 7, "source": "1/0", "logs": {"0": WROTE, "1": 0}},
    {"time": 104.1, "kind": "failure", "rank": 1, "what": WHAT},
    {"time": 104.2, **_ENDED, "logs": {"0": len(LOG)}},
    {"time": 106.0, "kind": "stopped", "attempt": 1},
]
UNENDED = FAILED[:5]


def reported(*steps: int | None, ranks: int = 2, **values: float) -> list[dict[str, Any]]:
    """Return metric rows of ranks in cell 1 of that run; by default ``loss`` is the step."""
    return [
        {"time": 101.5, "rank": rank, "attempt": 1}
        | ({} if step is None else {"step": step})
        | (values or {"loss": 1.0 + (step or 0)})
        for step in steps
        for rank in range(ranks)
    ]


def failed_run(
    base: Path,
    name: str = STAMP,
    *,
    events: Sequence[Mapping[str, Any]] = FAILED,
    rows: Sequence[Mapping[str, Any]] | None = None,
    torn: str = "",
    **facts: Any,
) -> Path:
    """Return the run folder below ``base``; both files end with the text ``torn``."""
    path = base / ".nbddp" / "runs" / name
    path.mkdir(parents=True)
    (path / "events.jsonl").write_text(lines(events) + torn)
    (path / "metrics.jsonl").write_text(lines(reported(0, 1, 0) if rows is None else rows) + torn)
    (path / "run.json").write_text(json.dumps({"nproc": 2, "backend_used": "gloo", **facts}))
    (path / "rank0.log").write_text(LOG)
    return path
