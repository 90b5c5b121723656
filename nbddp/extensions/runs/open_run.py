"""Find a run, check that its folder is safe, and read its state with the age of that state."""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbddp.errors import RequestError
from nbddp.extensions.runs import SCHEMA, STATE_FILE
from nbddp.extensions.runs.find import (
    MAX_SHOWN_NAMES,
    find_run,
    is_in_name,
    matching_runs,
    runs_below,
)
from nbddp.extensions.runs.kept_ranks import kept_ranks
from nbddp.extensions.runs.live_index import entered_runs
from nbddp.formatting import format_seconds, list_some
from nbddp.private_files import open_private_file, open_private_folder

STALE = 3.0  # seconds without a heartbeat
CLOCK_STEP = 1.0  # seconds by which the clock may be set back while a kernel runs
_TEMPORARY = "nbddp-runs-"  # the folder of runs if that of the notebook is read-only


def find(name: str | None) -> Path:
    """Return the folder of a run, which is this user's and private.

    Without a name, it is the live run of this folder, else the only live run of this user, else the
    newest run of this folder.

    Raises:
        RequestError: there is no such run, several match, or its folder is not safe.
    """
    here = runs_below(Path.cwd())
    if name is not None:
        elsewhere = matching_runs(name, live_runs())
        is_path = os.sep in name or name in (".", "..")
        if not is_path and elsewhere and not any(is_in_name(name, run.name) for run in here):
            return _only(elsewhere, name)
        return checked(find_run(name, Path.cwd()))
    live = [run for run in here if is_live(run)]
    if live:
        return live[0]
    elsewhere = live_runs()
    if elsewhere:
        return _only(elsewhere, None)
    return checked(find_run(None, Path.cwd()))


def _only(runs: list[Path], name: str | None) -> Path:
    if len(runs) > 1:
        folders = list_some([str(run) for run in runs], MAX_SHOWN_NAMES)
        which = f"{name!r} matches {len(runs)}" if name else f"you have {len(runs)}"
        raise RequestError(f"{which} live runs, so name one: {folders}")
    return runs[0]


def checked(path: Path) -> Path:
    """Return the absolute path of a run's folder.

    Raises:
        RequestError: it is no folder of a run, it is a link, or another user could change it.
    """
    folder = path.absolute()
    if folder.is_symlink():
        raise RequestError(f"{path} is a link; name the folder of the run itself")
    folder = folder.resolve()
    is_run = folder.parts[-3:-1] == (".nbddp", "runs") or folder.parent.name.startswith(_TEMPORARY)
    if not is_run:
        raise RequestError(f"{path} is not in a folder `.nbddp/runs`, so it is no run")
    for private in (folder.parent, folder):
        try:
            with open_private_folder(private):
                pass
        except OSError as error:
            raise RequestError(f"run {folder.name} is not safe to read: {error.strerror}") from None
    return folder


def live_runs() -> list[Path]:
    """Return the live runs, oldest first; runs of killed kernels only if their ranks are kept."""
    paths = {*entered_runs(), *kept_ranks()}
    return sorted({path for path in paths if is_live(path)}, key=lambda path: path.name)


def is_live(path: Path) -> bool:
    """Return whether a run is going on, as far as this machine knows."""
    with suppress(RequestError):
        state = read_state(checked(path))
        has_ranks = state["kernel"]["is_alive"] is not False or path.resolve() in kept_ranks()
        return has_ranks and not state["is_over"]
    return False


def read_state(path: Path) -> dict[str, Any]:
    """Return the state that the controller wrote, with ``folder``, ``age``, ``note``.

    ``age`` is the number of seconds since the controller's last sign of life, and ``note`` says
    what is wrong with it; empty if nothing is.

    Raises:
        RequestError: the run has no state, or one that cannot be read.
    """
    shown = f"`nbddp show {path.name}` shows what else is in its folder"
    try:
        with os.fdopen(open_private_file(path / STATE_FILE, os.O_RDONLY)) as file:
            written, state = os.fstat(file.fileno()).st_mtime, json.load(file)
        schema = state["schema"]
    except FileNotFoundError:
        raise RequestError(
            f"run {path.name} has no state: it has just started, or it is of another version of "
            f"nbddp; {shown}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"the state of run {path.name} is not readable: {error}") from None
    if schema != SCHEMA:
        raise RequestError(
            f"the state of run {path.name} is of another version of nbddp: it has schema {schema}, "
            f"and this version reads {SCHEMA}; {shown}"
        )
    age = max(0.0, time.time() - written)
    kernel = {**state["kernel"], "is_alive": None if state["is_over"] else _is_alive(state)}
    state = {**state, "folder": str(path), "kernel": kernel, "age": round(age, 1)}
    return {**state, "note": "" if state["is_over"] else _note(path, kernel, age)}


def _is_alive(state: dict[str, Any]) -> bool | None:
    """Return whether the kernel is alive; None on another machine."""
    kernel = state["kernel"]
    if kernel["host"] != platform.node():
        return None
    import psutil  # takes 20 ms, and a run that is over needs it not

    with suppress(psutil.Error):
        process = psutil.Process(kernel["pid"])
        is_ended = process.status() == psutil.STATUS_ZOMBIE  # its parent has not read the exit code
        return not is_ended and process.create_time() <= kernel["started"] + CLOCK_STEP
    return False


def _note(path: Path, kernel: dict[str, Any], age: float) -> str:
    ago = format_seconds(age)
    if kernel["is_alive"] is False:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(kernel["started"]))
        kept = kept_ranks().get(path.resolve())
        ranks = "so are its ranks" if kept is None else f"its ranks are alive ({kept.describe()})"
        return (
            f"the kernel is dead (process {kernel['pid']}, started {started}), and {ranks}; this "
            f"is the last state that it wrote, {ago} ago"
        )
    if age <= STALE:
        return ""
    if kernel["is_alive"] is None:
        return f"this state is {ago} old; the kernel is on {kernel['host']}, and may be dead"
    return (
        f"this state is {ago} old: the kernel (process {kernel['pid']}) is alive, but it is "
        "stopped, busy in code that holds Python's lock, or cannot write to the folder of the run"
    )
