"""Decide whether and how to recover from a failure, and describe the cost (pure functions)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from nbddp.errors import ArgumentError
from nbddp.formatting import plural
from nbddp.wire.frozen import Frozen


class RecoveryMethod(Enum):
    """How a cell is run again; the methods are tried in this order."""

    HEAL = "heal"  # replace dead ranks; the others keep their state
    RESTART = "restart"  # start all ranks again and replay earlier cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often a cell is run again after a failure, by method.

    ``is_elastic``: also restart, with more ranks, whenever a node joins; that is not a failure.
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
        """Return how often this method may be used."""
        return self.heals if method is RecoveryMethod.HEAL else self.restarts


class RecoveryCost(Frozen):
    """The seconds of a recovery, by what they were needed for.

    Attributes:
        detected: from the failure to the end of the cell.
        healed: in a recovery by a heal: until the dead ranks were replaced.
        restarted: in a recovery by a restart: until all ranks were ready again.
        replayed: until ``cells`` earlier cells had run again.
        cells: the number of these cells.

    >>> str(RecoveryCost(detected=0.02, healed=0.31))
    'noticed after 0.02 s, healed in 0.31 s'
    """

    detected: float
    healed: float | None = None
    restarted: float | None = None
    replayed: float | None = None
    cells: int | None = None

    def __str__(self) -> str:
        text = f"noticed after {self.detected:.2f} s"
        if self.healed is not None:
            return f"{text}, healed in {self.healed:.2f} s"
        cells = f"{plural(self.cells or 0, 'cell')} replayed in {self.replayed:.2f} s"
        return f"{text}, restarted in {self.restarted:.2f} s, {cells}"

    @property
    def total(self) -> float:
        """All seconds of the recovery."""
        parts = (self.detected, self.healed, self.restarted, self.replayed)
        return sum(filter(None, parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailure:
    """A failure that ended an attempt, and the cost of the recovery.

    Attributes:
        what: the first cause, in one line.
        at: ``time.time()`` of the failure on the rank.
        step: the last step that any rank had reported; None if there was none.
        is_death: whether a rank is dead, so that a heal can replace it.
        method: how the cell was run again.
        cost: the cost of the recovery; None before.
    """

    what: str
    at: float
    step: float | None
    is_death: bool = False
    method: RecoveryMethod = RecoveryMethod.RESTART
    cost: RecoveryCost | None = None

    def repeated_steps(self, resumed_at: float) -> int | None:
        """Return how many steps run a second time if the first step now is ``resumed_at``."""
        if self.step is None:
            return None
        return max(0, int(self.step - resumed_at) + 1)


def describe_recoveries(methods: Sequence[RecoveryMethod], seconds: float) -> str:
    """Describe how often and by which methods a cell was run again, and the cost.

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
    """Choose how to recover from the last failure; None if no retries are left.

    >>> died = AttemptFailure(what="rank 1 is gone", at=0.0, step=30, is_death=True)
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
    """Say why the cell is not run again; empty if it is.

    >>> first = AttemptFailure(what="rank 1 is gone", at=0.0, step=30)
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
