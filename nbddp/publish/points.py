"""What ranks have reported, put together step by step: the mean of all, and how they spread. Pure.

A tracker has one run whatever the number of ranks. Of a metric that several ranks report, ``loss``
is their mean, ``loss/rank0`` what rank 0 has, ``loss/min`` and ``loss/max`` the lowest and the
highest; of one that a single rank reports there is ``loss`` alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from nbddp.record.finished import NOT_NUMBERS

PATIENCE = 30.0  # seconds that a step waits for a rank that is behind
KEPT = 20_000  # steps of metrics of which it is known that they were published
GRACE = 5.0  # seconds in which a rank that has not reported a metric yet may begin to
NOWHERE = (-1, 0)  # where a rank is that has reported nothing

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One step, of all ranks that reported it.

    Attributes:
        step: as it was reported; of metrics without steps, their count.
        at: when it was reported first, in ``time.time()``.
        attempt: in which attempt.
        part: the number of its cell in the order in which they ran, from 0; -1 before the first.
        is_again: whether that cell did again what was done before.
        values: by name.
    """

    step: int
    at: float
    attempt: int
    part: int
    is_again: bool
    values: Mapping[str, float]


@dataclass(slots=True)
class _Group:
    """What belongs to one step, as long as ranks are missing."""

    key: tuple[int, int, int]  # part, lap, step
    at: float
    attempt: int
    values: dict[str, dict[int, float]] = field(default_factory=dict)


class Points:
    """Puts rows together; of a run that goes on, those steps that no rank is still to report.

    A step that a rank reports once more, or that lies before its last one, is a step of its own, as
    in a second training in one cell. What comes later than :data:`PATIENCE` allows is ``late``, and
    left out: a mean of those that came is published already.
    """

    def __init__(self) -> None:
        self.late = 0
        self.world: frozenset[int] = frozenset()
        self._begins: list[float] = []
        self._again: list[bool] = []
        self._part = -1
        self._open: dict[tuple[int, int, int], _Group] = {}
        self._laps: dict[tuple[int, str, int], tuple[int, int]] = {}  # a rank's lap, its last step
        self._counts: dict[tuple[int, str, int], int] = {}  # of what has no steps
        self._bases: dict[tuple[int, str], int] = {}  # where counting goes on, in a part
        self._highest: dict[str, int] = {}  # count, of what has no steps
        self._seen: dict[str, dict[int, tuple[int, int]]] = {}  # the last lap and step of each rank
        self._first: dict[str, float] = {}  # when a metric came first in this part
        self._done: dict[tuple[int, int, int, str], None] = {}  # the last that were published
        self._newest = 0.0

    def begin_part(self, at: float, *, is_again: bool) -> None:
        """A cell began then, in ``time.time()``."""
        self._begins.append(at)
        self._again.append(is_again)

    def add(self, row: Row) -> None:
        """What a rank has reported."""
        part = bisect_right(self._begins, row["time"]) - 1
        if part > self._part:
            self._part, self._seen, self._first = part, {}, {}
        self._newest = max(self._newest, row["time"])
        rank = int(row["rank"])
        for name, value in row.items():
            if name not in NOT_NUMBERS and isinstance(value, int | float):
                self._put(row, part, name, rank, float(value))

    def _put(self, row: Row, part: int, name: str, rank: int, value: float) -> None:
        lap, step = self._place(part, name, rank, row.get("step"))
        key = (part, lap, step)
        if (*key, name) in self._done:
            self.late += 1
            return
        group = self._open.get(key)
        if group is None:
            self._open[key] = group = _Group(key, row["time"], int(row["attempt"]))
        group.values.setdefault(name, {})[rank] = value
        if part == self._part:
            self._first.setdefault(name, row["time"])
            self._seen.setdefault(name, {})[rank] = (lap, step)

    def _place(self, part: int, name: str, rank: int, step: Any) -> tuple[int, int]:
        """Which lap of its steps a rank is in, and at which step; without one, by its count."""
        who = (part, name, rank)
        if not isinstance(step, int | float) or not math.isfinite(step):
            base = self._bases.setdefault((part, name), self._highest.get(name, -1) + 1)
            count = self._counts.get(who, 0)
            self._counts[who] = count + 1
            self._highest[name] = max(self._highest.get(name, -1), base + count)
            return 0, base + count
        lap, last = self._laps.get(who, (0, None))
        lap += last is not None and step <= last
        self._laps[who] = (lap, int(step))
        return lap, int(step)

    def ready(self) -> list[Point]:
        """The steps that are complete, in the order in which they began."""
        return list(self._taken(is_all=False))

    def rest(self) -> list[Point]:
        """All that is left: nothing more comes, or its cell is over."""
        return list(self._taken(is_all=True))

    def _taken(self, *, is_all: bool) -> Iterator[Point]:
        for group in list(self._open.values()):
            if not is_all and not self._is_complete(group):
                return
            del self._open[group.key]
            yield self._point(group)

    def _is_complete(self, group: _Group) -> bool:
        if group.key[0] < self._part or self._newest - group.at > PATIENCE:
            return True
        for name, values in group.values.items():
            seen = self._seen.get(name, {})
            is_new = self._newest - self._first.get(name, self._newest) < GRACE
            expected = self.world | set(seen) if is_new else set(seen)
            if any(seen.get(rank, NOWHERE) < group.key[1:] for rank in expected - set(values)):
                return False
        return True

    def _point(self, group: _Group) -> Point:
        part, _, step = group.key
        self._done |= {(*group.key, name): None for name in group.values}
        while len(self._done) > KEPT:
            del self._done[next(iter(self._done))]
        found: dict[str, float] = {}
        for name, values in group.values.items():
            found |= _spread(name, values)
        means = {name: _mean(list(values.values())) for name, values in group.values.items()}
        return Point(
            step=step,
            at=group.at,
            attempt=group.attempt,
            part=part,
            is_again=part >= 0 and self._again[part],
            values=found | means,
        )


def _spread(name: str, values: Mapping[int, float]) -> dict[str, float]:
    """How the ranks differ; nothing where there is but one."""
    if len(values) < 2:
        return {}
    known = [value for value in values.values() if not math.isnan(value)] or [math.nan]
    of_first = {f"{name}/rank0": values[0]} if 0 in values else {}
    return of_first | {f"{name}/min": min(known), f"{name}/max": max(known)}


def _mean(values: list[float]) -> float:
    """Of all ranks: NaN where one of them has it."""
    return fmean(values) if all(map(math.isfinite, values)) else sum(values) / len(values)
