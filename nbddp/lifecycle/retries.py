"""Whether to go on after a failure, how, and what that cost: pure, told by whoever does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from nbddp.errors import ArgumentError
from nbddp.formatting import plural


class RecoveryMethod(Enum):
    """How a cell is begun again: what is tried first stands first."""

    HEAL = "heal"  # new ranks in the places of dead ones, the others keep all that they have
    RESTART = "restart"  # all ranks are new, and what was done is done again


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often a cell is begun again after a failure, each way.

    With ``is_elastic`` also whenever a node has come, which no failure is: with more ranks then.
    """

    heals: int = 0
    restarts: int = 0
    is_elastic: bool = False

    def __post_init__(self) -> None:
        given: dict[str, object] = {"heal": self.heals, "max_restarts": self.restarts}
        for name, count in given.items():
            if not isinstance(count, int) or count < 0:
                raise ArgumentError(f"{name} must be a whole number, 0 or more, got {count!r}")

    def limit(self, method: RecoveryMethod) -> int:
        """How often this way."""
        return self.heals if method is RecoveryMethod.HEAL else self.restarts


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailure:
    """A failure that ended an attempt.

    Attributes:
        attempt: which one.
        what: the first cause, in one line.
        at: when it happened, as the rank's ``time.time()`` has it.
        step: the last step that any rank had reported, None if none had.
        is_death: whether a rank died of it, so that there is one to replace.
        method: how it went on.
    """

    attempt: int
    what: str
    at: float
    step: float | None
    is_death: bool = False
    method: RecoveryMethod = RecoveryMethod.RESTART


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRecord:
    """How an attempt took up the work.

    Attributes:
        failure: what it came back from.
        detected: seconds from the failure to the end of the cell.
        restarted: seconds until all ranks were ready again.
        replayed: seconds that the earlier cells took, and ``cells`` how many they were.
        healed: seconds that it took instead of both where the failure's method is to heal.
    """

    failure: AttemptFailure
    detected: float
    restarted: float = 0.0
    replayed: float = 0.0
    cells: int = 0
    healed: float = 0.0

    @property
    def seconds(self) -> float:
        """All that it took."""
        return self.detected + self.restarted + self.replayed + self.healed

    def __str__(self) -> str:
        """In words."""
        return describe_recovery(self.facts())

    def resumed(self, step: float, at: float) -> dict[str, float | int | None]:
        """For the record of its first step, reported at a time of ``time.time()``."""
        seconds = round(at - self.failure.at, 3)
        return {"step": step, "lost": self.repeated_steps(step), "seconds": seconds, **self.facts()}

    def facts(self) -> dict[str, float | int]:
        """For the record, in seconds and cells."""
        if self.failure.method is RecoveryMethod.HEAL:
            return {"detected": round(self.detected, 3), "healed": round(self.healed, 3)}
        return {
            "detected": round(self.detected, 3),
            "restarted": round(self.restarted, 3),
            "replayed": round(self.replayed, 3),
            "cells": self.cells,
        }

    def repeated_steps(self, resumed_at: float) -> int | None:
        """How many steps are done a second time, when the first one now is ``resumed_at``."""
        if self.failure.step is None:
            return None
        return max(0, int(self.failure.step - resumed_at) + 1)


def describe_recovery(facts: Mapping[str, Any]) -> str:
    """What is recorded of a recovery, in words.

    >>> describe_recovery({"detected": 0.02, "healed": 0.31})
    'noticed after 0.02 s, healed in 0.31 s'
    """
    text = f"noticed after {facts['detected']:.2f} s"
    if "healed" in facts:
        return f"{text}, healed in {facts['healed']:.2f} s"
    return (
        f"{text}, restarted in {facts['restarted']:.2f} s, "
        f"{plural(facts['cells'], 'cell')} replayed in {facts['replayed']:.2f} s"
    )


def describe_recoveries(methods: Sequence[RecoveryMethod], seconds: float) -> str:
    """How often a cell was begun again, in which ways, and what that cost.

    >>> describe_recoveries([RecoveryMethod.RESTART], 0.84)
    'after 1 restart, 0.8 s lost'
    >>> describe_recoveries([RecoveryMethod.HEAL] * 2 + [RecoveryMethod.RESTART], 1.36)
    'after 2 heals, 1 restart, 1.4 s lost'
    """
    counts = [
        plural(methods.count(method), method.value)
        for method in RecoveryMethod
        if method in methods
    ]
    return f"after {', '.join(counts)}, {seconds:.1f} s lost"


def next_method(failures: Sequence[AttemptFailure], retries: Retries) -> RecoveryMethod | None:
    """How to go on from the last setback; None if no way is left.

    >>> died = AttemptFailure(attempt=1, what="rank 1 is gone", at=0.0, step=30, is_death=True)
    >>> next_method([died], Retries(heals=1, restarts=1)), next_method([died], Retries())
    (<RecoveryMethod.HEAL: 'heal'>, None)
    """
    for method in RecoveryMethod:
        used = sum(each.method is method for each in failures[:-1])
        if used < retries.limit(method) and (
            method is not RecoveryMethod.HEAL or failures[-1].is_death
        ):
            return method
    return None


def why_no_retry(failures: Sequence[AttemptFailure], retries: Retries) -> str:
    """Return why the cell is not started again; empty if it is.

    >>> first = AttemptFailure(attempt=1, what="rank 1 is gone", at=0.0, step=30)
    >>> why_no_retry([first], Retries(restarts=3))
    ''
    >>> why_no_retry([first, first], Retries(restarts=3))
    'it failed at step 30 twice in a row: starting again would not help'
    >>> why_no_retry([first], Retries(heals=3))
    'no rank died, so there is none to heal'
    """
    if next_method(failures, retries) is None:
        if retries.heals and not retries.restarts and not failures[-1].is_death:
            return "no rank died, so there is none to heal"
        used = [
            plural(retries.limit(method), method.value)
            for method in RecoveryMethod
            if retries.limit(method)
        ]
        return f"no retries left ({', '.join(used)})" if used else "no restart was allowed"
    if len(failures) > 1 and failures[-1].step == failures[-2].step:
        step = failures[-1].step
        where = "before the first step" if step is None else f"at step {step:g}"
        return f"it failed {where} twice in a row: starting again would not help"
    return ""
