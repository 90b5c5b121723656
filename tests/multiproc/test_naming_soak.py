"""Ranks that are equal: in a hundred fresh groups at most one rank is said to be waited for.

It takes five minutes: ``pytest -m soak tests/multiproc/test_naming_soak.py``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from drivers.ranks import Ranks
from multiproc.conftest import WarmLauncher
from processes import wait_until

from nbddp.record.waiting.collective_matcher import Straggler

pytestmark = [pytest.mark.multiproc, pytest.mark.soak, pytest.mark.timeout(900)]

RUNS, AT_ONCE = 100, 5
# twelve seconds: both what is told of the last two seconds and what takes ten have their say
EQUAL = """
import time
x, work, began, step, is_over = torch.ones(1000), torch.ones(128, 128), time.monotonic(), 0, False
while not is_over:
    time.sleep(0.02)
    work @ work
    dist.all_reduce(x)
    nbddp.log(step=step, loss=1.0)
    step += 1
    if step % 10 == 0:
        flag = torch.tensor([float(time.monotonic() - began > 12)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        is_over = bool(flag.item())
"""


def named_in(launcher: WarmLauncher, number: int) -> Straggler | None:
    """The first rank that is named in one run of a fresh group, if one is."""
    found: list[Straggler] = []

    def look() -> bool:
        awaited = group.awaited()
        if awaited is not None:
            found.append(awaited)
        return handle.is_finished

    group = Ranks(nproc=2 + number % 3, launcher=launcher)
    try:
        group.start()
        handle = group.begin(EQUAL)
        assert wait_until(look, timeout=60.0)
        assert handle.result is not None
        assert handle.result.is_ok
    finally:
        group.close()
    return found[0] if found else None


def test_of_a_hundred_runs_with_equal_ranks_at_most_one_names_a_rank(
    launcher: WarmLauncher,
    folder: Path,  # noqa: ARG001 - where the runs are recorded
) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        told = list(threads.map(lambda number: named_in(launcher, number), range(RUNS)))
    named = {number: each for number, each in enumerate(told) if each is not None}
    assert len(told) == RUNS
    assert len(named) <= 1, named
