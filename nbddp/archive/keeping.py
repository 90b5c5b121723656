"""Runs that are taken away, kept or noted, and how much of the disk old ones may take."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from nbddp.archive.summary import MARKS, Summary, read_marks
from nbddp.errors import ArgumentError, RequestError
from nbddp.record.folder import write_whole

logger = logging.getLogger("nbddp")

LIMIT = "limit.json"
UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def mark(path: Path, *, note: str | None = None, is_kept: bool | None = None) -> None:
    """Write down what the user says of a run; what is None stays as it was.

    Raises:
        RequestError: it cannot be written.
    """
    said = {"note": note, "is_kept": is_kept}
    marks = read_marks(path) | {name: its for name, its in said.items() if its is not None}
    _write(path / MARKS, marks)


def remove(path: Path, *, current: Path | None, is_running: bool, is_forced: bool) -> None:
    """Take a run's folder away.

    Raises:
        RequestError: it goes on, it is to be kept, or it cannot be taken away.
    """
    if is_running or (current is not None and path.resolve() == current.resolve()):
        raise RequestError(f"run {path.name} goes on: `%ddp stop` ends it")
    if read_marks(path).get("is_kept") is True and not is_forced:
        raise RequestError(f"run {path.name} is to be kept; --force takes it away all the same")
    try:
        _take_away(path)
    except OSError as error:
        raise RequestError(f"run {path.name} cannot be taken away: {error.strerror}") from None


def _take_away(path: Path) -> None:
    """Under another name first: what is half gone is no run."""
    gone = path.with_name(f".{path.name}.gone")
    path.rename(gone)
    shutil.rmtree(gone)


def bytes_of(text: str) -> int:
    """How many bytes are meant.

    Raises:
        ArgumentError: it is no amount.

    >>> bytes_of("500 MB"), bytes_of("1.5GiB")
    (500000000, 1610612736)
    """
    number = text.rstrip("MGTiBmgtb ")
    unit = text[len(number) :].strip().upper()
    with suppress(ValueError):
        if unit in UNITS and float(number) > 0:
            return int(float(number) * UNITS[unit])
    raise ArgumentError(f"expected an amount like 500MB, 20GB or 1TiB, got {text!r}")


def set_limit(base: Path, limit: int | None) -> None:
    """How many bytes the runs of a folder may take; None for as many as they like.

    Raises:
        RequestError: it cannot be written.
    """
    if limit is None:
        path = base / ".nbddp" / LIMIT
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RequestError(f"{path} cannot be taken away: {error.strerror}") from None
    else:
        _write(base / ".nbddp" / LIMIT, {"bytes": limit})


def limit_of(base: Path) -> int | None:
    """What the user has set; None if nothing was."""
    try:
        limit = json.loads((base / ".nbddp" / LIMIT).read_text())["bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return limit if isinstance(limit, int) else None


def too_old(runs: Iterable[Summary], limit: int) -> list[Summary]:
    """The oldest of those that take more than the limit together, so many as must go.

    Those that are to be kept, and those that go on, stay, whatever they take; so does the newest.
    """
    newest_first = sorted(runs, key=lambda run: (run.began, run.name), reverse=True)
    total = sum(run.size for run in newest_first)
    gone: list[Summary] = []
    for run in reversed(newest_first[1:]):
        if total <= limit:
            break
        if not run.is_kept and not run.is_running and run.outcome != "not recorded":
            gone.append(run)
            total -= run.size
    return gone


def make_room(base: Path, *, current: Path | None = None) -> list[str]:
    """Take the oldest runs away that are beyond the limit, if one was set; their names."""
    limit = limit_of(base)
    if limit is None:
        return []
    from nbddp.archive.listing import list_runs

    gone = []
    for run in too_old(list_runs(base, current=current).runs, limit):
        try:
            remove(run.path, current=current, is_running=run.is_running, is_forced=False)
        except RequestError as error:
            logger.warning("%s", error)
        else:
            gone.append(run.name)
    return gone


def make_room_aside(base: Path, *, current: Path | None) -> None:
    """The same on another thread, if a limit was set: a start does not wait for it."""
    if limit_of(base) is not None:
        threading.Thread(
            target=lambda: make_room(base, current=current), name="nbddp-room", daemon=True
        ).start()


def _write(path: Path, facts: object) -> None:
    try:
        write_whole(path, json.dumps(facts) + "\n")
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}") from None


def say_gone(names: Sequence[str]) -> str:
    """What was taken away, in words.

    >>> say_gone(["a"]), say_gone(["a", "b"])
    ('1 run taken away: a', '2 runs taken away: a, b')
    """
    return f"{len(names)} run{'' if len(names) == 1 else 's'} taken away: {', '.join(names)}"
