"""What a run came to, counted while it goes on: steps, pace, the last numbers and a small curve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

MAX_NAMES = 64
MAX_BUCKETS = 48  # of a small curve
MAX_LOOPS = 16  # of a rank that are told apart


@dataclass(slots=True)
class SmallCurve:
    """The values of a metric in at most 48 stretches of equal length: the lowest and the highest.

    >>> curve = SmallCurve()
    >>> for value in (3.0, math.nan, 1.0):
    ...     curve.add(value)
    >>> curve.pairs()
    [[3.0, 3.0], [nan, nan], [1.0, 1.0]]
    """

    _lows: list[float] = field(default_factory=list)
    _highs: list[float] = field(default_factory=list)
    _width: int = 1  # how many values a stretch has
    _count: int = 0  # in the last one

    def add(self, value: float) -> None:
        """The next value; one that is not finite leaves a gap where nothing else is."""
        if not math.isfinite(value):
            value = math.nan
        if not self._lows or self._count >= self._width:
            if len(self._lows) >= MAX_BUCKETS:
                self._halve()
            self._lows.append(value)
            self._highs.append(value)
            self._count = 1
            return
        self._count += 1
        if not value >= self._lows[-1]:  # also where there was no number so far
            self._lows[-1] = _lower(self._lows[-1], value)
        if not value <= self._highs[-1]:
            self._highs[-1] = _higher(self._highs[-1], value)

    def pairs(self) -> list[list[float]]:
        """The lowest and the highest value of each stretch."""
        return [[low, high] for low, high in zip(self._lows, self._highs, strict=True)]

    def _halve(self) -> None:
        lows, highs = self._lows, self._highs
        self._lows = [_lower(*pair) for pair in zip(lows[::2], lows[1::2], strict=True)]
        self._highs = [_higher(*pair) for pair in zip(highs[::2], highs[1::2], strict=True)]
        self._width *= 2


def _lower(one: float, other: float) -> float:
    """The lower one; a number where only one is."""
    return other if math.isnan(one) or other < one else one


def _higher(one: float, other: float) -> float:
    return other if math.isnan(one) or other > one else one


@dataclass(slots=True)
class _Loop:
    """Steps that are counted together."""

    steps: int = 0
    changes: int = 0  # from one to the next, without a pause between
    seconds: float = 0.0  # that these took
    step: float = math.nan
    at: float = math.nan  # NaN after a pause

    def add(self, at: float, step: float) -> None:
        """A step was reported, perhaps again."""
        if step == self.step and not math.isnan(self.at):
            return
        self.steps += 1
        if at >= self.at:  # not so after a pause, nor where a clock was set back
            self.changes += 1
            self.seconds += at - self.at
        self.step, self.at = step, at


@dataclass(slots=True)
class _Rank:
    loops: dict[str, _Loop] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)


class Tally:
    """Counts what the ranks of a run report, in all of its cells; one thread adds and asks.

    A step that is done a second time counts a second time. Time between two cells is no training.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._curves: dict[str, tuple[int, SmallCurve]] = {}

    def add(self, rank: int, at: float, step: float | None, values: Mapping[str, float]) -> None:
        """A rank reported numbers for a step, at its ``time.time()``."""
        its = self._ranks.get(rank)
        if its is None:
            its = self._ranks[rank] = _Rank()
        for name, value in values.items():
            self._note(rank, its, name, value)
        key = next(iter(values), "")
        loop = its.loops.get(key)
        if loop is None:
            if len(its.loops) >= MAX_LOOPS:
                return
            loop = its.loops[key] = _Loop()
        loop.add(at, loop.steps if step is None else step)

    def _note(self, rank: int, its: _Rank, name: str, value: float) -> None:
        if name not in its.last and len(its.last) >= MAX_NAMES:
            return
        its.last[name] = value
        owner, curve = self._curves.get(name) or self._curves.setdefault(name, (rank, SmallCurve()))
        if owner == rank:
            curve.add(value)

    def pause(self) -> None:
        """What comes next is of another cell."""
        for its in self._ranks.values():
            for loop in its.loops.values():
                loop.at = math.nan

    def clear(self) -> None:
        """Begin anew, for another run."""
        self._ranks.clear()
        self._curves.clear()

    def facts(self) -> dict[str, Any]:
        """For the record: of the loop with most steps how many and how fast; all last numbers."""
        if not self._ranks:
            return {}
        loops = [_busiest(its) for its in self._ranks.values()]
        rates = [each.changes / each.seconds for each in loops if each.seconds > 0]
        return {
            "steps": max(each.steps for each in loops),
            "steps_per_second": round(fmean(rates), 4) if rates else None,
            "last": self._last(),
            "curves": {name: curve.pairs() for name, (_, curve) in self._curves.items()},
        }

    def _last(self) -> dict[str, dict[str, float]]:
        found: dict[str, list[float]] = {}
        for its in self._ranks.values():
            for name, value in its.last.items():
                found.setdefault(name, []).append(value)
        return {name: _spread(values) for name, values in found.items()}


def _busiest(its: _Rank) -> _Loop:
    return max(its.loops.values(), key=lambda loop: loop.steps, default=_Loop())


def _spread(values: list[float]) -> dict[str, float]:
    """Mean, lowest and highest over ranks: all of them NaN where a rank has no number."""
    if not all(map(math.isfinite, values)):
        worst = next(value for value in values if not math.isfinite(value))
        return {"mean": worst, "low": worst, "high": worst}
    mean = sum(value / len(values) for value in values)  # their sum may be beyond any float
    return {"mean": mean, "low": min(values), "high": max(values)}
