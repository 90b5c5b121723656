"""The answers about a run, as JSON values: for ``--json``, and for other programs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nbddp.errors import RequestError
from nbddp.extensions.runs import SCHEMA
from nbddp.extensions.runs.kept_ranks import kept_ranks
from nbddp.extensions.runs.open_run import read_state
from nbddp.record.log_reader import log_name, tail
from nbddp.ui.ansi import strip

MAX_POINTS = 200  # of a curve
STOP = {"act": "stop"}
_WHY = ("schema", "run", "folder", "kernel", "age", "note", "is_over", "state", "cell")

Json = dict[str, Any]


def status(path: Path) -> Json:
    """Return the state of a run."""
    return read_state(path)


def why(path: Path) -> Json:
    """Return the reason for the state of a run: its failure, hang or slow rank, and the way out."""
    state = read_state(path)
    answer = {**{name: state[name] for name in _WHY}, **state["why"]}
    if state["kernel"]["is_alive"] is False:
        before = f"the last that it knew: {answer['text']}"
        again = "restart the kernel and run the cells again; the logs and metrics are kept"
        back = f"`%ddp rejoin {path.name}` in a notebook takes the ranks back"
        answer["kind"], answer["text"] = "dead kernel", f"{state['note']}\n{before}"
        answer["way_out"] = back if path.resolve() in kept_ranks() else again
    ranks = [
        {name: rank[name] for name in ("rank", "state", "line", "file", "code", "call")}
        for rank in state["ranks"]
    ]
    return {**answer, "ranks": ranks}


def logs(path: Path, rank: int | None, lines: int) -> Json:
    """Return the last lines of a rank, or of each rank, without control sequences.

    Raises:
        RequestError: the rank has no log, or it cannot be read.
    """
    names = [log_name(rank)] if rank is not None else _logs_in(path)
    return {**_head(path), "logs": [_log(path / name, lines) for name in names]}


def _logs_in(path: Path) -> list[str]:
    numbers = [each.name[len("rank") : -len(".log")] for each in path.glob("rank*.log")]
    return [log_name(number) for number in sorted(int(each) for each in numbers if each.isdigit())]


def _log(path: Path, lines: int) -> Json:
    if path.is_symlink() or not path.is_file():
        raise RequestError(f"there is no log {path.name} in {path.parent}")
    try:
        text = tail(path, lines + 1)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    found = strip(text).split("\n") if text else []
    rank = int(path.stem.removeprefix("rank"))
    return {"rank": rank, "lines": found[-lines:], "has_more": len(found) > lines}


def metrics(path: Path, names: str = "") -> Json:
    """Return the newest values of the metrics of all ranks, and their thinned curves.

    Raises:
        RequestError: no metric has one of these names.
    """
    from nbddp.extensions.runs.comparison import metric_filter, no_such_metric
    from nbddp.extensions.runs.stored_run import StoredRun

    store = StoredRun(path, metric_filter(names) if names else None).metrics()
    if names and not store.names():
        recorded = StoredRun(path).metrics()
        raise no_such_metric(names, recorded.names(), of="run", more=recorded.dropped_names)
    found = []
    for name in store.names():
        curves = store.curves(name)
        one = curves[min(curves)]
        chosen = range(0, len(one.steps), math.ceil(len(one.steps) / MAX_POINTS) or 1)
        found.append(
            {
                "name": name,
                "last": {rank: curve.last for rank, curve in curves.items()},
                "rank": min(curves),
                "steps": [one.steps[at] for at in chosen],
                "values": [one.mean[at] for at in chosen],
            }
        )
    return {**_head(path), "metrics": found, "dropped": store.dropped_names}


def runs(base: Path, words: Sequence[str] = (), most: int | None = None) -> Json:
    """Return the summaries of the runs that were started in a folder, newest first.

    Raises:
        ArgumentError: a word is no condition.
    """
    from nbddp.extensions.runs.run_list import list_runs

    listing = list_runs(base, words)
    return {
        "schema": SCHEMA,
        "runs": [_summary(asdict(run)) for run in listing.runs[:most]],
        "total": listing.total,
        "left_out": listing.left_out,
    }


def _summary(run: Json) -> Json:
    return {"run": run["path"].name, "folder": str(run.pop("path")), **_without(run, "curves")}


def show(path: Path) -> Json:
    """Return the facts and the cells of a run; a run that goes on has what is there now."""
    from nbddp.extensions.runs.stored_run import StoredRun
    from nbddp.extensions.runs.summary import describe_run_end

    run = StoredRun(path)
    cells = [
        {
            **_without(asdict(cell), "logs", "failures"),
            "failures": [
                {"rank": rank, "text": text, "is_consequence": follows}
                for rank, (text, follows) in cell.failures.items()
            ],
        }
        for cell in run.cells
    ]
    ending = describe_run_end(run, current=None)
    return {**_head(path), "ending": ending, "facts": run.facts, "cells": cells}


def act(path: Path, request: Json) -> Json:
    """Ask the kernel of a run to interrupt its cell, to stop its ranks, or to kill one.

    Ranks that are kept alive without a kernel can only be stopped.

    Raises:
        RequestError: it is refused, the run is over, or its kernel is dead.
    """
    from nbddp.extensions.terminal.action_socket import ask

    state = read_state(path)
    kept = kept_ranks().get(path.resolve())
    if kept is not None and not kept.has_notebook and request == STOP:
        return {**_head(path), "done": kept.end()}
    if state["is_over"] or state["kernel"]["is_alive"] is not True:
        raise RequestError(state["note"] or f"run {path.name} is over")
    return {**_head(path), "done": ask(state["kernel"]["socket"], request)}


def _head(path: Path) -> Json:
    return {"schema": SCHEMA, "run": path.name, "folder": str(path)}


def _without(facts: Json, *names: str) -> Json:
    left_out: Collection[str] = names
    return {name: value for name, value in facts.items() if name not in left_out}
