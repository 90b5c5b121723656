"""What torch's profiler has traced on all ranks, as one file and a table of what differs.

The file is for Perfetto and ``chrome://tracing``: a process for each rank, one clock for all.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbddp.record.run_folder import replace_file
from nbddp.wire.trace_messages import TraceSent, TraceSteps

MAX_EVENTS = 400_000  # of all ranks, in the merged file: a page takes some 100 bytes for each
COMPRESS_ABOVE = 4 * 2**20  # bytes of JSON from which on it is compressed
MIN_RELATIVE_SPREAD = 0.2  # of the most that a rank spends there,
MIN_SPREAD_MS = 1.0  # milliseconds, and
MIN_SPREAD_SHARE = 0.01  # of the time that was traced: from there on ranks differ
OUTSIDE_OPERATORS = "in no operator: Python, or asleep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What came of a cell that was to be traced.

    Attributes:
        cell: its number.
        asked: the steps.
        ranks: what each rank has traced, of those that have something.
        missing: why each other rank has nothing.
        path: the merged file, None if there is none; ``size`` is in bytes.
        folder: each rank's own file is here, as torch has written it.
        error: seconds by which the clocks of two machines may be apart.
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
        """How many there are in the merged file."""
        return sum(trace.events for trace in self.ranks.values())

    @property
    def steps(self) -> list[int]:
        """The first and the last step that some rank has."""
        traced = [each.steps for each in self.ranks.values() if each.steps]
        return [min(each[0] for each in traced), max(each[1] for each in traced)] if traced else []


@dataclass(frozen=True, slots=True)
class TraceRow:
    """An operator: milliseconds that each rank spent in it itself, and how many calls."""

    name: str
    self_ms: Mapping[int, float]
    calls: Mapping[int, int]

    @property
    def spread(self) -> float:
        """By how many milliseconds ranks differ."""
        return max(self.self_ms.values()) - min(self.self_ms.values())


def trace_rows(ranks: Mapping[int, TraceSent]) -> list[TraceRow]:
    """What each operator cost each rank, those first in which ranks differ most.

    >>> slow = TraceSent(idle_ms=90.0)
    >>> quick = TraceSent(idle_ms=10.0, operator_times={"gloo:barrier": [80.0, 2]})
    >>> [(row.name, row.spread) for row in trace_rows({0: slow, 1: quick})]
    [('in no operator: Python, or asleep', 80.0), ('gloo:barrier', 80.0)]
    """
    names = dict.fromkeys(name for each in ranks.values() for name in each.operator_times)
    rows = [TraceRow(OUTSIDE_OPERATORS, {rank: each.idle_ms for rank, each in ranks.items()}, {})]
    for name in names:
        by_rank = {rank: each.operator_times.get(name, (0.0, 0)) for rank, each in ranks.items()}
        rows.append(
            TraceRow(
                name,
                {rank: float(each[0]) for rank, each in by_rank.items()},
                {rank: int(each[1]) for rank, each in by_rank.items()},
            )
        )
    return sorted(rows, key=lambda row: -row.spread)


def is_different(row: TraceRow, ranks: Mapping[int, TraceSent]) -> bool:
    """Whether ranks differ in it by more than they do by chance."""
    largest = max(row.self_ms.values())
    traced_ms = 1000 * max(each.seconds for each in ranks.values())
    return row.spread >= max(
        MIN_SPREAD_MS, MIN_RELATIVE_SPREAD * largest, MIN_SPREAD_SHARE * traced_ms
    )


# ---- one file


def write_merged(
    parts: Mapping[int, Path], folder: Path, name: str, facts: Mapping[str, Any]
) -> Path:
    """Put the ranks' parts into one file; it is there in whole or not.

    Args:
        parts: each rank's events.
        folder: where to write.
        name: of the file, without what tells its kind.
        facts: what else stands in it, beside the events.

    Raises:
        OSError: it cannot be written; then nothing of it is left.
    """
    is_big = sum(part.stat().st_size for part in parts.values()) > COMPRESS_ABOVE
    path = folder / (f"{name}.json.gz" if is_big else f"{name}.json")
    head = json.dumps({"displayTimeUnit": "ms", **facts})[:-1]
    pieces = [part.read_bytes() for part in parts.values()]
    with replace_file(path) as whole, ExitStack() as stack:
        file: Any = whole
        if is_big:
            packed = gzip.GzipFile(filename="", fileobj=whole, mode="wb", compresslevel=5)
            file = stack.enter_context(packed)
        file.write(f'{head}, "traceEvents": [\n'.encode())
        file.write(b",\n".join(each for each in pieces if each))
        file.write(b"\n]}\n")
    return path


def ranks_by_reason(missing: Mapping[int, str]) -> dict[str, Sequence[int]]:
    """The ranks that have nothing, by the reason."""
    by_reason: dict[str, list[int]] = defaultdict(list)
    for rank, why in sorted(missing.items()):
        by_reason[why].append(rank)
    return dict(by_reason)
