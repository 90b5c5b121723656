"""Whether to start again after a failure, and how many steps that cost."""

from typing import NamedTuple

import pytest
from syrupy.assertion import SnapshotAssertion

from nbddp.lifecycle.retries import (
    AttemptFailure,
    RecoveryMethod,
    Retries,
    next_method,
    why_no_retry,
)

HEAL, RESTART = RecoveryMethod.HEAL, RecoveryMethod.RESTART


def setback(step: float | None) -> AttemptFailure:
    return AttemptFailure(what="rank 1 is gone", at=10.0, step=step)


def death(step: float, way: RecoveryMethod = HEAL) -> AttemptFailure:
    return AttemptFailure(what="rank 1 is gone", at=0.0, step=step, is_death=True, method=way)


ONE, TWO, NINE = (Retries(restarts=count) for count in (1, 2, 9))
BOTH = Retries(heals=1, restarts=1)


class Case(NamedTuple):
    failures: list[AttemptFailure]
    retries: Retries
    method: RecoveryMethod | None


WAYS = {
    "the first of one restart": Case([setback(3)], ONE, RESTART),
    "the second of two restarts": Case([setback(3), setback(5)], TWO, RESTART),
    "no restart is left": Case([setback(3), setback(5)], ONE, None),
    "no restart of two is left": Case([setback(3), setback(5), setback(7)], TWO, None),
    "no restart was asked for": Case([setback(3)], Retries(), None),
    "a death": Case([death(1)], BOTH, HEAL),
    "a second death": Case([death(1), death(2)], BOTH, RESTART),
    "a third death": Case([death(1), death(2, RESTART), death(3)], BOTH, None),
    "no heal is left": Case([death(1), death(2)], Retries(heals=1), None),
    "all live": Case([setback(3)], Retries(heals=3, restarts=1), RESTART),
    "all live and cannot be healed": Case([setback(3)], Retries(heals=3), None),
    "progress in between": Case([setback(30), setback(40), setback(30)], NINE, RESTART),
}
IN_VAIN = {f"twice at step {step}": [setback(step), setback(step)] for step in (30, None, 0)}


@pytest.mark.parametrize("case", WAYS.values(), ids=WAYS)
def test_a_failed_cell_is_retried_as_often_as_allowed(case: Case) -> None:
    assert next_method(case.failures, case.retries) is case.method
    assert bool(why_no_retry(case.failures, case.retries)) is (case.method is None)


def test_the_reason_for_not_retrying_is_given(snapshot: SnapshotAssertion) -> None:
    reasons = {name: why_no_retry(case.failures, case.retries) for name, case in WAYS.items()}
    reasons |= {name: why_no_retry(failures, NINE) for name, failures in IN_VAIN.items()}
    assert {name: why for name, why in reasons.items() if why} == snapshot


def test_steps_between_the_checkpoint_and_the_failure_are_lost() -> None:
    assert setback(34).repeated_steps(31) == 4
    assert setback(30).repeated_steps(31) == 0
    assert setback(30).repeated_steps(0) == 31
    assert setback(None).repeated_steps(0) is None
