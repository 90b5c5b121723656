"""Real ranks of which one is slow: it is marked, and the others are not."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from drivers.ranks import MakeRanks, Ranks
from processes import wait_until

from nbddp.record.waiting.stragglers import StragglerLag

pytestmark = pytest.mark.multiproc

TRAIN = """import time
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
def train(pause):
    for step in range(10_000):
        time.sleep(pause)
        model(torch.ones(4, 8)).sum().backward()
        nbddp.log(step=step, loss=1.0)
"""
COUNT = """import time
def count(pause):
    for step in range(10_000):
        time.sleep(pause)
        nbddp.log(step=step, loss=1.0)
"""
LONG = 20.0  # seconds in which there is time enough for a wrong mark


def seen_while(
    group: Ranks, source: str, is_enough: Callable[[dict[int, StragglerLag]], bool]
) -> dict[int, StragglerLag]:
    """The marks when they are enough, or else those after a while; the cell then is over."""
    seen: dict[int, StragglerLag] = {}

    def look() -> bool:
        ranks = group.snapshot(handle).ranks
        seen.update({each.rank: each.lag for each in ranks if each.lag is not None})
        return is_enough(seen) or time.monotonic() > until

    handle = group.begin(source)
    until = time.monotonic() + LONG
    wait_until(look, timeout=2 * LONG)
    group.interrupt()
    wait_until(lambda: handle.is_finished, timeout=30.0)
    return seen


def test_ranks_that_wait_for_a_slow_one_mark_it_though_all_make_the_same_steps(
    make_group: MakeRanks,
) -> None:
    group = make_group(3)
    group.run(TRAIN)
    seen = seen_while(group, "train(0.3 if rank == 1 else 0.1)", bool)
    assert list(seen) == [1]
    assert seen[1].is_waited_for
    assert 0.3 < seen[1].share < 0.9


def test_ranks_that_never_meet_are_marked_by_their_steps(
    make_group: MakeRanks,
) -> None:
    group = make_group(3)
    group.run(COUNT)
    seen = seen_while(group, "count(0.2 if rank == 2 else 0.1)", bool)
    assert list(seen) == [2]
    assert not seen[2].is_waited_for
    assert 0.3 < seen[2].share < 0.7
