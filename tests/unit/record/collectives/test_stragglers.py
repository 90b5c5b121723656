"""Find stragglers by their step rate and by their arrivals at collectives, and never by chance."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from nbddp.record.collectives import stragglers
from nbddp.record.collectives.collective_history import Arrival
from nbddp.record.collectives.collective_matcher import GroupMatcher
from nbddp.record.collectives.stragglers import StragglerLag, slow_by_step_rate
from nbddp.record.metrics import MetricStore
from nbddp.record.step_rate import StepRate
from nbddp.wire.collective import Collective


def pace(per_second: float, error: float = 0.01, loop: str = "loss") -> StepRate:
    return StepRate(100, per_second, 50.0, seconds=10.0, error=error, loop=loop)


USUAL = pace(10.0)


def test_only_a_clearly_slower_rank_in_the_same_loop_is_reported_with_its_lag() -> None:
    for last, share in (
        (pace(15.0), 0),
        (pace(8.5), 0),
        (pace(7.5), 0.25),
        (pace(7.8), 0.22),
        (pace(7.8, error=0.06), 0),  # maybe by chance
        (pace(0.1, loop="epoch"), 0),
    ):
        lag = StragglerLag(pytest.approx(share), 10.0, is_waited_for=False)
        found = slow_by_step_rate({0: USUAL, 1: USUAL, 2: last})
        assert found == ({2: lag} if share else {}), last
    assert slow_by_step_rate({2: USUAL}) == slow_by_step_rate({0: pace(0.0), 1: pace(0.0)}) == {}


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


RANKS = range(4)
BEGIN = 1e9
Step = Callable[[int, int], float]  # how long a rank works at a step


def arrive(group: GroupMatcher, rank: int, rows: list[list[Any]], now: float) -> list[int]:
    """A rank reports rows of number, time, and whether all wait for the last one."""
    arrivals = [
        Arrival(at, Collective("all_reduce", number), 0, meets) for number, at, meets in rows
    ]
    return [found.call.number for each in arrivals for found in group.add(rank, each, now)]


def meet(work: Step, *, steps: int = 200, ranks: range = RANKS, buckets: int = 1) -> GroupMatcher:
    """Ranks that work, call so many collectives at the end of it, and go on when all are there."""
    group, now = GroupMatcher(ranks), BEGIN
    for step in range(steps):
        ends = [now + work(rank, step) for rank in ranks]
        for rank, end in zip(ranks, ends, strict=True):
            came = [[buckets * step + at + 1, end + at * 1e-4, True] for at in range(buckets)]
            arrive(group, rank, came, end)
        now = max(ends) + buckets * 1e-4
    return group


def lags_of(work: Step, **options: Any) -> dict[int, StragglerLag]:
    lags = meet(work, **options).stragglers()
    assert lags is not None
    return lags


def coming(rows: Callable[[int], list[list[Any]]]) -> GroupMatcher:
    """Each rank comes to collectives as these rows say."""
    group = GroupMatcher(RANKS)
    for rank in RANKS:
        arrive(group, rank, rows(rank), 0.0)
    return group


def test_a_straggler_has_the_share_of_time_that_other_ranks_waited() -> None:
    lags = lags_of(lambda rank, _step: 0.15 if rank == 2 else 0.10)
    assert list(lags) == [2]
    assert lags[2].share == pytest.approx(1 / 3, abs=0.01)
    assert 20 <= lags[2].seconds <= 22
    assert lags[2].is_waited_for
    lags = lags_of(lambda rank, _step: 1.0 if rank == 1 else 0.5, steps=30, buckets=5)
    assert list(lags) == [1]
    assert lags[1].share == pytest.approx(0.5, abs=0.03)
    slow = {9: 0.2, 41: 0.15}
    lags = lags_of(lambda rank, _step: slow.get(rank, 0.1), ranks=range(64))
    assert list(lags) == [9, 41]
    assert lags[9].share > lags[41].share


def test_equal_ranks_and_alternating_or_single_waits_give_no_straggler() -> None:
    works: dict[str, Step] = {
        "equal": lambda _rank, _step: 0.1,
        "nearly": lambda rank, _step: 0.1 + rank * 0.002,
        "in turn": lambda rank, step: 0.3 if rank == step % 4 else 0.1,
        "one checkpoint": lambda rank, step: 5.0 if (rank, step) == (0, 190) else 0.1,
        "now and then": lambda rank, step: 4.0 if rank == 0 and step % 60 == 0 else 0.1,
    }
    found = {name: meet(work).stragglers() for name, work in works.items()}
    assert [name for name, lags in found.items() if lags != {}] == []


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_a_few_seconds_on_one_rank_gives_no_straggler(seed: int) -> None:
    """As on a machine with more to do than it has cores."""
    chance = random.Random(seed)
    assert meet(lambda _rank, _step: chance.uniform(0.02, 0.2)).stragglers() == {}
    busy = [chance.randrange(4) for _ in range(50)]
    assert lags_of(lambda rank, step: 0.15 if rank == busy[step // 8] else 0.1, steps=400) == {}


def test_a_late_rank_that_blocks_no_other_rank_is_not_a_straggler() -> None:
    """The source of a broadcast does not wait; a call may return before the last rank arrives."""
    broadcast = coming(
        lambda rank: [[step + 1, 1e9 + step * 0.1 + rank * 0.05, False] for step in range(200)]
    )
    assert broadcast.stragglers() is None
    late = [0.0, 0.0, 0.0, 0.5]
    ahead = coming(
        lambda rank: [[step + 1, 1e9 + step * 0.1 + late[rank], True] for step in range(200)]
    )
    assert ahead.stragglers() == {}


def test_a_few_collectives_or_a_single_rank_are_not_enough_for_a_straggler() -> None:
    def work(rank: int, _step: int) -> float:
        return 2.0 if rank == 2 else 1.0

    assert not meet(work, steps=stragglers.MIN_WAITS + 1).stragglers()
    assert meet(work, steps=stragglers.MIN_WAITS + 3).stragglers()
    short = meet(lambda rank, _step: 0.01 * rank, steps=100)
    assert short.stragglers() is None, "in so short a time"
    assert meet(lambda _rank, _step: 0.1, ranks=range(1)).stragglers() is None


def test_old_waits_are_forgotten_and_give_no_straggler() -> None:
    slow = meet(lambda rank, step: 0.2 if rank == 2 and step < 100 else 0.1, steps=400)
    assert slow.stragglers() == {}
    group = meet(lambda rank, _step: 0.2 if rank == 2 else 0.1)
    last = BEGIN + 200 * 0.2001
    arrive(group, 0, [[201, last, True]], last + stragglers.MAX_IDLE / 2)
    assert group.stragglers()
    arrive(group, 0, [[202, last, True]], last + stragglers.MAX_IDLE + 1)
    assert group.stragglers() is None
    rare = lags_of(lambda rank, _step: 9.0 if rank == 2 else 6.0, steps=40)
    assert 80 < rare[2].seconds <= stragglers.MAX_WINDOW + 9


def test_gaps_in_reported_arrivals_do_not_change_the_lag() -> None:
    """More collectives than are kept: those in between are unknown."""
    group = coming(
        lambda rank: [
            [step + 1, 1e9 + step * 0.2 + (0.1 if rank == 2 else 0.0), True]
            for step in range(400)
            if step % 20 < 10
        ]
    )
    lags = group.stragglers()
    assert lags is not None
    assert lags[2].share == pytest.approx(0.5, abs=0.02)


def test_frequent_collectives_match_even_if_one_rank_reports_them_seconds_later() -> None:
    group = GroupMatcher(range(2))
    rows = [[step + 1, BEGIN + step * 1e-3, True] for step in range(5000)]
    met = [number for rank in range(2) for number in arrive(group, rank, rows, 0.0)]
    assert met == list(range(1, 5000)), "of the last one nobody knows what came next"
