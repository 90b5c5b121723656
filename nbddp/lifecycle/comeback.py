"""Whether to start again after a failure, and what that cost: pure, told by whoever does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Setback:
    """A failure that ended an attempt.

    Attributes:
        attempt: which one.
        what: the first cause, in one line.
        at: when it happened, as the rank's ``time.time()`` has it.
        step: the last step that any rank had reported, None if none had.
    """

    attempt: int
    what: str
    at: float
    step: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comeback:
    """How an attempt took up the work.

    Attributes:
        setback: what it came back from.
        detected: seconds from the failure to the end of the cell.
        restarted: seconds until all ranks were ready again.
        replayed: seconds that the earlier cells took, and ``cells`` how many they were.
    """

    setback: Setback
    detected: float
    restarted: float
    replayed: float
    cells: int

    def resumed(self, step: float, at: float) -> dict[str, float | int | None]:
        """For the record of its first step, reported at a time of ``time.time()``."""
        seconds = round(at - self.setback.at, 3)
        return {"step": step, "lost": self.lost(step), "seconds": seconds, **self.facts()}

    def facts(self) -> dict[str, float | int]:
        """For the record, in seconds and cells."""
        return {
            "detected": round(self.detected, 3),
            "restarted": round(self.restarted, 3),
            "replayed": round(self.replayed, 3),
            "cells": self.cells,
        }

    def lost(self, resumed_at: float) -> int | None:
        """How many steps are done a second time, when the first one now is ``resumed_at``."""
        if self.setback.step is None:
            return None
        return max(0, int(self.setback.step - resumed_at) + 1)


def say_restarts(count: int, seconds: float) -> str:
    """How often a cell was begun again, and what that cost.

    >>> say_restarts(1, 0.84), say_restarts(2, 1.36)
    ('after 1 restart, 0.8 s lost', 'after 2 restarts, 1.4 s lost')
    """
    return f"after {count} restart{'' if count == 1 else 's'}, {seconds:.1f} s lost"


def why_stop(setbacks: Sequence[Setback], max_restarts: int) -> str:
    """Why it is not worth, or not allowed, to start again; empty if it is.

    >>> first = Setback(attempt=1, what="rank 1 is gone", at=0.0, step=30)
    >>> why_stop([first], 3)
    ''
    >>> why_stop([first, first], 3)
    'it failed at step 30 twice in a row: starting again would not help'
    """
    if len(setbacks) > max_restarts:
        times = "restart was" if max_restarts == 1 else f"{max_restarts} restarts were"
        return f"the {times} used up" if max_restarts else "no restart was allowed"
    if len(setbacks) > 1 and setbacks[-1].step == setbacks[-2].step:
        step = setbacks[-1].step
        where = "before the first step" if step is None else f"at step {step:g}"
        return f"it failed {where} twice in a row: starting again would not help"
    return ""
