"""The request for the trace of a rank, and the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from nbddp.wire.frozen import Frozen


class SendTrace(Frozen):
    """Write the trace of this cell to a file, and answer with a :class:`TraceSent`.

    Attributes:
        cell: number of the cell.
        rank: the rank, for the names of its files.
        folder: where to write; empty on another machine, which sends its files instead.
        start_ns: where the merged file begins, in nanoseconds of the rank's ``time.time_ns()``.
        max_events: the most events of this rank in the merged file.
        node: name of the rank's machine; empty if all ranks are on one.
    """

    cell: int
    rank: int
    folder: str
    start_ns: int
    max_events: int
    node: str = ""


class TraceSent(Frozen):
    """The trace of one rank.

    Attributes:
        reason: why there is no trace; empty if there is one.
        steps: the first and the last traced step; the last one may be incomplete.
        seconds: duration of the trace.
        events: number of events in the merged file.
        left_out: number of the shortest events, which are not in that file.
        operator_times: for each operator, milliseconds without the operators that it calls, and
            number of calls.
        idle_ms: milliseconds in which the main thread ran no operator and no collective.
    """

    reason: str = ""
    steps: list[int] = field(default_factory=list)
    seconds: float = 0.0
    events: int = 0
    left_out: int = 0
    operator_times: Mapping[str, Any] = field(default_factory=dict)
    idle_ms: float = 0.0
