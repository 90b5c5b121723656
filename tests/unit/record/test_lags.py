"""Find ranks that make significantly fewer steps than the others."""

from __future__ import annotations

import random

import pytest

from nbddp.record.metrics import MetricStore
from nbddp.record.step_rate import StepRate
from nbddp.record.waiting.stragglers import StragglerLag, slow_by_step_rate


def pace(per_second: float, error: float = 0.01, loop: str = "loss") -> StepRate:
    return StepRate(100, per_second, 50.0, seconds=10.0, error=error, loop=loop)


USUAL = pace(10.0)


def test_a_rank_with_a_lower_step_rate_is_reported_with_its_lag() -> None:
    slow = pace(7.5)
    lag = StragglerLag(0.25, 10.0, is_waited_for=False)
    assert slow_by_step_rate({0: USUAL, 1: USUAL, 2: slow}) == {2: lag}
    assert slow_by_step_rate({2: slow}) == slow_by_step_rate({0: pace(0.0), 1: pace(0.0)}) == {}


def test_only_a_clearly_slower_rank_in_the_same_loop_is_reported() -> None:
    for last, is_told in (
        (pace(15.0), False),
        (pace(8.5), False),
        (pace(7.8), True),
        (pace(7.8, error=0.06), False),  # maybe by chance
        (pace(0.1, loop="epoch"), False),
    ):
        assert bool(slow_by_step_rate({0: USUAL, 1: USUAL, 2: last})) == is_told, last


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_rank_exceeds_the_lag_threshold_and_noise_does_not(seed: int) -> None:
    chance, curves = random.Random(seed), MetricStore()
    for rank in range(8):
        at = 1000.0
        for step in range(200):
            at += chance.uniform(0.05, 0.15) * (1.5 if rank == 5 else 1.0)
            if at < 1012:
                curves.add(rank, at, step, {"loss": 1.0})
    paces = {rank: curves.step_rate(rank) for rank in range(8)}
    found = slow_by_step_rate({rank: each for rank, each in paces.items() if each})
    assert list(found) == [5]
    assert found[5].share == pytest.approx(1 / 3, abs=0.12)


def test_the_error_of_a_step_rate_is_unknown_after_a_few_steps() -> None:
    curves, errors = MetricStore(), []
    for step in range(6):
        curves.add(0, 1000.0 + step, step, {"loss": 1.0})
        rate = curves.step_rate(0)
        assert rate is not None
        errors.append(rate.error)
    assert errors == [*[float("inf")] * 5, 0.0]
    assert (rate.loop, rate.seconds) == ("loss", 5.0)
