"""The tools of an agent: functions that return one line of JSON.

Their names, types and docstrings are what the agent sees, in `nbddp mcp` and in a Jupyter server.
They have the prefix ``nbddp_``, because a Jupyter server has tools of other packages, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import ParamSpec

from nbddp.errors import NbddpError, RequestError
from nbddp.extensions.agents.quoted_answers import MAX_BYTES, Json, quote
from nbddp.extensions.runs import SCHEMA
from nbddp.extensions.runs.live_runs import live
from nbddp.extensions.runs.open_run import checked, find
from nbddp.extensions.terminal import answers
from nbddp.extensions.terminal.answer_texts import to_line

MAX_LINES = 1000  # of a log
MAX_POINTS = 20  # of a curve
MAX_RUNS = 20

_P = ParamSpec("_P")


def _tool(function: Callable[_P, str]) -> Callable[_P, str]:
    """Return an error of nbddp as an answer: the agent can act on its text."""

    @wraps(function)
    def answer(*args: _P.args, **kwargs: _P.kwargs) -> str:
        try:
            return function(*args, **kwargs)
        except NbddpError as error:
            return to_line({"schema": SCHEMA, "error": str(error)[: MAX_BYTES // 2]})

    return answer


@_tool
def nbddp_status(run: str | None = None, max_bytes: int = MAX_BYTES) -> str:
    """Return what the group of a run and each of its ranks are doing now: line, call, step, memory.

    The cell may be running: this disturbs neither it nor the kernel.

    Args:
        run: a run's name or a part of it; by default the live run of this folder, else yours.
        max_bytes: the longest answer.
    """
    return _with_way_out(state := answers.status(find(run)), state.pop("why"), max_bytes)


@_tool
def nbddp_why(run: str | None = None, max_bytes: int = MAX_BYTES) -> str:
    """Return why a run has failed, hangs or is slow, and the way out. Ask this first.

    It names the rank that failed first, or the ranks that wait in a hang and those that never came,
    with their calls and lines. Do not run a cell again before you have asked.

    Args:
        run: a run's name or a part of it; by default the live run of this folder, else yours.
        max_bytes: the longest answer.
    """
    answer = answers.why(find(run))
    return _with_way_out(answer, answer, max_bytes)


@_tool
def nbddp_logs(
    rank: int | None = None,
    lines: int = 50,
    run: str | None = None,
    max_bytes: int = MAX_BYTES,
) -> str:
    """Return the last lines that a rank has printed, or all ranks; the newest line is the first.

    Args:
        rank: the rank; by default all ranks.
        lines: how many lines of each rank, at most 1000.
        run: a run's name or a part of it; by default the live run of this folder, else yours.
        max_bytes: the longest answer.
    """
    answer = answers.logs(find(run), rank, max(1, min(lines, MAX_LINES)))
    for log in answer["logs"]:
        log["lines"].reverse()
    return quote(answer, max_bytes=max_bytes)


@_tool
def nbddp_metrics(metrics: str = "", run: str | None = None, max_bytes: int = MAX_BYTES) -> str:
    """Return the newest value of each metric on each rank, and at most 20 points of its curve.

    Args:
        metrics: names or patterns such as "loss,val/*"; by default all.
        run: a run's name or a part of it; by default the live run of this folder, else yours.
        max_bytes: the longest answer.
    """
    answer = answers.metrics(find(run), metrics)
    for metric in answer["metrics"]:
        points = list(zip(metric.pop("steps"), metric.pop("values"), strict=True))
        metric["points"] = points[:: -(-len(points) // MAX_POINTS) or 1]
    return quote(answer, max_bytes=max_bytes)


@_tool
def nbddp_runs(words: str = "", max_bytes: int = MAX_BYTES) -> str:
    """List the runs of this folder, newest first, and your live runs in all folders.

    Args:
        words: conditions, such as "lr=0.1 loss<0.5", or parts of names.
        max_bytes: the longest answer.
    """
    listed = answers.runs(Path.cwd(), words.split(), MAX_RUNS)
    listed["runs"] = [run for run in listed["runs"] if _is_safe(Path(run["folder"]))]
    return quote({**listed, "live": live()["runs"]}, max_bytes=max_bytes)


@_tool
def nbddp_compare(runs: list[str], metrics: str = "", max_bytes: int = MAX_BYTES) -> str:
    """Compare runs: the last values of their metrics, and how settings and code differ.

    Args:
        runs: the names of two to eight runs.
        metrics: names or patterns such as "loss,val/*"; by default the first few.
        max_bytes: the longest answer.
    """
    from nbddp.extensions.runs.comparison import compare

    found = compare([find(run) for run in runs], metrics)
    last = [dict(zip(found.metrics, found.final_values(run), strict=True)) for run in found.runs]
    answer: Json = {
        "runs": [
            {"run": run.name, "last": values} for run, values in zip(found.runs, last, strict=True)
        ],
        "differences": dict(found.differences()),
        "code": [diff for diff in found.code_diffs if diff],
    }
    return quote(answer, max_bytes=max_bytes)


@_tool
def nbddp_check(file: str, max_bytes: int = MAX_BYTES) -> str:
    """Look for mistakes of distributed code in a Python file, without running it.

    Args:
        file: a file below this folder, which ends in .py.
        max_bytes: the longest answer.
    """
    from nbddp.extensions.checks.checker import check_source
    from nbddp.extensions.checks.source import CellSource
    from nbddp.group.find_script import script_text

    path = _own_file(file)
    with script_text(path, file) as text:
        findings = check_source(CellSource(text, is_cell=False))
    return quote({"file": file, "findings": [*map(asdict, findings)]}, max_bytes=max_bytes)


@_tool
def nbddp_interrupt(run: str | None = None) -> str:
    """Interrupt the cell that runs; all variables are kept.

    Args:
        run: a run's name or a part of it; by default the live run of this folder, else yours.
    """
    return to_line(answers.act(find(run), {"act": "interrupt"}))


@_tool
def nbddp_stop(run: str | None = None) -> str:
    """End all ranks of a run; their variables are lost.

    Args:
        run: a run's name or a part of it; by default the live run of this folder, else yours.
    """
    return to_line(answers.act(find(run), {"act": "stop"}))


@_tool
def nbddp_kill_rank(rank: int, run: str | None = None) -> str:
    """Kill one rank of a run; its variables are lost.

    Args:
        rank: the rank to kill, with SIGKILL.
        run: a run's name or a part of it; by default the live run of this folder, else yours.
    """
    return to_line(answers.act(find(run), {"act": "kill", "rank": rank}))


READING: tuple[Callable[..., str], ...] = (
    nbddp_status,
    nbddp_why,
    nbddp_logs,
    nbddp_metrics,
    nbddp_runs,
    nbddp_compare,
    nbddp_check,
)
ACTING: tuple[Callable[..., str], ...] = (nbddp_interrupt, nbddp_stop, nbddp_kill_rank)


def _with_way_out(answer: Json, reason: Json, max_bytes: int) -> str:
    """Quote an answer; the kind of a failure and the way out are words of nbddp."""
    kind, way_out = reason.pop("kind"), reason.pop("way_out")
    quoted = answer if reason is answer else {**answer, "why": reason["text"]}
    return quote(quoted, max_bytes=max_bytes, kind=kind, way_out=way_out)


def _is_safe(folder: Path) -> bool:
    try:
        checked(folder)
    except RequestError:
        return False
    return True


def _own_file(name: str) -> Path:
    """Return the path of a Python file of this user below the working folder.

    Raises:
        RequestError: it is elsewhere, a link, or of another user.
    """
    base = Path.cwd().resolve()
    path = base / name
    if path.suffix != ".py" or not path.is_relative_to(base) or path.resolve() != path:
        raise RequestError(f"{name} is not checked: it is no file below {base} that ends in .py")
    if not path.is_file():
        raise RequestError(f"there is no file {name} in {base}")
    if path.stat().st_uid != os.geteuid():
        raise RequestError(f"{name} is not checked: it belongs to another user")
    return path
