"""Merge the profiler traces of all ranks into one file, and compare the ranks.

The file is for Perfetto and ``chrome://tracing``. It has a process for each rank, and one clock.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbddp.extensions.trace import TraceSteps
from nbddp.extensions.trace.messages import TraceSent
from nbddp.record.run_folder import replace_file

MAX_EVENTS = 400_000  # of all ranks, in the merged file: the page needs about 100 bytes for each
COMPRESS_ABOVE = 4 * 2**20  # bytes of JSON above which the file is compressed
# ranks differ in an operator if the difference exceeds all three
MIN_RELATIVE_SPREAD = 0.2  # of the largest time of a rank in it
MIN_SPREAD_MS = 1.0  # milliseconds
MIN_SPREAD_SHARE = 0.01  # of the traced time
OUTSIDE_OPERATORS = "in no operator: Python, or asleep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The trace of a cell on all ranks.

    Attributes:
        cell: number of the cell.
        asked: the requested steps.
        ranks: the trace of each rank that has one.
        missing: for each other rank, why it has none.
        path: the merged file; None if there is none.
        folder: the folder with the file of each rank, as torch wrote it.
        size: size of the merged file in bytes.
        error: seconds by which the clocks of two machines may differ.
    """

    cell: int
    asked: TraceSteps
    ranks: Mapping[int, TraceSent]
    missing: Mapping[int, str]
    path: Path | None = None
    folder: Path | None = None
    size: int = 0
    error: float = 0.0

    @property
    def events(self) -> int:
        """Number of events in the merged file."""
        return sum(trace.events for trace in self.ranks.values())

    @property
    def steps(self) -> list[int]:
        """The first and last step that any rank traced."""
        traced = [each.steps for each in self.ranks.values() if each.steps]
        return [min(each[0] for each in traced), max(each[1] for each in traced)] if traced else []


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One operator: milliseconds on each rank, without the operators it calls, and its calls."""

    name: str
    self_ms: Mapping[int, float]
    calls: Mapping[int, int]

    @property
    def spread(self) -> float:
        """Milliseconds between the slowest and the fastest rank."""
        return max(self.self_ms.values()) - min(self.self_ms.values())


def trace_rows(ranks: Mapping[int, TraceSent]) -> list[TraceRow]:
    """Return the time of each operator on each rank, the largest differences first.

    >>> slow = TraceSent(idle_ms=90.0)
    >>> quick = TraceSent(idle_ms=10.0, operator_times={"gloo:barrier": [80.0, 2]})
    >>> [(row.name, row.spread) for row in trace_rows({0: slow, 1: quick})]
    [('in no operator: Python, or asleep', 80.0), ('gloo:barrier', 80.0)]
    """
    names = dict.fromkeys(name for each in ranks.values() for name in each.operator_times)
    rows = [TraceRow(OUTSIDE_OPERATORS, {rank: each.idle_ms for rank, each in ranks.items()}, {})]
    for name in names:
        by_rank = {rank: each.operator_times.get(name, (0.0, 0)) for rank, each in ranks.items()}
        self_ms = {rank: float(each[0]) for rank, each in by_rank.items()}
        calls = {rank: int(each[1]) for rank, each in by_rank.items()}
        rows.append(TraceRow(name, self_ms, calls))
    return sorted(rows, key=lambda row: -row.spread)


def is_different(row: TraceRow, ranks: Mapping[int, TraceSent]) -> bool:
    """Return whether the ranks differ in this operator by more than chance."""
    largest = max(row.self_ms.values())
    traced_ms = 1000 * max(each.seconds for each in ranks.values())
    limits = (MIN_SPREAD_MS, MIN_RELATIVE_SPREAD * largest, MIN_SPREAD_SHARE * traced_ms)
    return row.spread >= max(limits)


# ---- one file


def write_merged(
    parts: Mapping[int, Path], folder: Path, name: str, facts: Mapping[str, Any]
) -> Path:
    """Write the events of all ranks to one file; on an error there is no file.

    Args:
        parts: the events of each rank.
        folder: the target folder.
        name: name of the file, without suffix.
        facts: further entries of the file, in addition to the events.

    Raises:
        OSError: the file cannot be written.
    """
    is_big = sum(part.stat().st_size for part in parts.values()) > COMPRESS_ABOVE
    path = folder / (f"{name}.json.gz" if is_big else f"{name}.json")
    head = json.dumps({"displayTimeUnit": "ms", **facts})[:-1]
    pieces = [part.read_bytes() for part in parts.values()]
    with replace_file(path) as whole, ExitStack() as stack:
        file: Any = whole
        if is_big:
            compressed = gzip.GzipFile(filename="", fileobj=whole, mode="wb", compresslevel=5)
            file = stack.enter_context(compressed)
        file.write(f'{head}, "traceEvents": [\n'.encode())
        file.write(b",\n".join(each for each in pieces if each))
        file.write(b"\n]}\n")
    return path
