"""What a file of numbers tells at a glance: all of a short one, samples of a long one."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from nbddp.record.tally import SmallCurve, Tally

SHORT = 64 << 10  # bytes: so much is read as a whole
SAMPLES = 12  # places that are looked at: each is a wait for the disk
SAMPLE = 512  # bytes at each, for one row
TAIL = 4 << 10  # bytes at the end, where the last numbers are
NEEDED = {"time", "rank"}
NOT_NUMBERS = {"time", "rank", "attempt", "step"}

Row = dict[str, Any]


def glance(path: Path) -> dict[str, Any]:
    """As :meth:`Tally.facts` has it; of a long file steps and pace are judged by its ends.

    Raises:
        OSError: the file cannot be read.
    """
    tally = Tally()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= SHORT:
            _count(tally, _rows(file, 0, size))
            return tally.facts()
        if hasattr(os, "posix_fadvise"):  # else far more is read than is looked at
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        room = size - TAIL
        places = [number * room // SAMPLES for number in range(SAMPLES)]
        samples = [row for place in places for row in _rows(file, place, SAMPLE, most=1)]
        last = _rows(file, room, TAIL)
    _count(tally, last)
    curves: dict[str, SmallCurve] = {}
    for row in (*samples, *last[-1:]):
        for name in row.keys() - NOT_NUMBERS:
            curves.setdefault(name, SmallCurve()).add(row[name])
    facts = tally.facts() | _by_ends([*samples, *last])
    return facts | {"curves": {name: curve.pairs() for name, curve in curves.items()}}


def last_numbers(path: Path) -> dict[str, Any]:
    """Of each metric the last value that is in the file, and the steps from its first to its end.

    Raises:
        OSError: the file cannot be read.
    """
    tally = Tally()
    with path.open("rb") as file:
        begin = max(0, os.fstat(file.fileno()).st_size - TAIL)
        rows = _rows(file, begin, TAIL)
        first = _rows(file, 0, SAMPLE, most=1)
    _count(tally, rows)
    return {"last": tally.facts().get("last", {}), "steps": _steps_between([*first, *rows])}


def _count(tally: Tally, rows: Sequence[Row]) -> None:
    for row in rows:
        values = {name: row[name] for name in row if name not in NOT_NUMBERS}
        tally.add(row["rank"], row["time"], row.get("step"), values)


def _rows(file: BinaryIO, begin: int, count: int, *, most: int | None = None) -> list[Row]:
    """The rows that lie within a part of the file as a whole, all or the first ones."""
    file.seek(begin)
    found: list[Row] = []
    for line in file.read(count).decode(errors="replace").split("\n")[1 if begin else 0 :]:
        if len(found) == most:
            break
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and row.keys() >= NEEDED:
                known = {name: each for name, each in row.items() if isinstance(each, int | float)}
                if known.keys() >= NEEDED:
                    found.append(known)
    return found


def _by_ends(rows: list[Row]) -> Row:
    """Steps and pace, from the first and the last of one rank's rows that have a step."""
    stepped = [row for row in rows if "step" in row]
    if not stepped:
        return {"steps": None, "steps_per_second": None}
    last = stepped[-1]
    first = next(row for row in stepped if row["rank"] == last["rank"])
    steps, seconds = last["step"] - first["step"], last["time"] - first["time"]
    pace = steps / seconds if seconds > 0 < steps else None
    return {"steps": _steps_between(stepped), "steps_per_second": pace}


def _steps_between(rows: list[Row]) -> float:
    """From the first to the highest: some count from 0, some from 1, some resume at 1,000."""
    steps = [row["step"] for row in rows if "step" in row]
    return max(steps) - steps[0] + 1 if steps else 0
