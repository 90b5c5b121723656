"""A trace by torch's profiler: which steps are asked for, and what a rank says of what it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSteps:
    """Which steps of a cell are traced: from ``first`` to ``last``, both included.

    >>> str(TraceSteps(first=10, last=15)), str(TraceSteps(first=3, last=3))
    ('steps 10 to 15', 'step 3')
    """

    first: int
    last: int
    with_memory: bool = False

    def __str__(self) -> str:
        return format_steps(self.first, self.last)


def format_steps(first: int, last: int) -> str:
    """Steps in words."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTrace:
    """Write down what was traced of this cell, and say what it is, as :class:`TraceSent`.

    ``folder`` is where; a rank of another machine gets none, and sends its files. ``zero`` is the
    instant that the merged file begins at, in nanoseconds of the rank's own ``time.time_ns()``;
    ``most`` is how many events this rank may have in it. ``node`` is the rank's, if there are many.
    """

    request: int
    cell: int
    rank: int
    folder: str
    zero: int
    most: int
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSent:
    """What a rank has traced.

    Attributes:
        why: why there is nothing, else empty.
        steps: the first and the last one that were traced, or a part of one.
        seconds: how long it was traced.
        events: how many there are in the merged file; ``left_out`` of the shortest are not.
        spent: milliseconds in each operator, without those that it calls, and how many calls.
        rest: milliseconds that the main thread was in no operator, while no collective went on.
    """

    why: str = ""
    steps: list[int] = field(default_factory=list)
    seconds: float = 0.0
    events: int = 0
    left_out: int = 0
    spent: Mapping[str, Any] = field(default_factory=dict)
    rest: float = 0.0
