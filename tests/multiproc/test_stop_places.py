"""An interrupt at any point of a start or a first cell leaves a usable group.

At each of them: ``pytest -m soak``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator

import pytest
from drivers.ranks import Ranks, WarmLauncher
from interrupt_places import Stop

from nbddp import CellInterruptedError

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.timeout(400),
    # CPython reports and drops an interrupt in the callback of a weak reference
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MEET = "x = torch.ones(1); dist.all_reduce(x); assert int(x) == 2"


@pytest.fixture
def stopped_at(launcher: WarmLauncher, folder: object) -> Iterator[Callable[[int], bool]]:  # noqa: ARG001 - where the runs are recorded
    """Starts a group and runs a cell, with a stop at some place; whether there was such a place."""
    groups: list[Ranks] = []

    def stop_at(place: int) -> bool:
        group = Ranks(nproc=2, launcher=launcher)
        groups.append(group)
        stop, before = Stop(place), sys.gettrace()
        try:
            sys.settrace(stop)
            group.start()
            group.run("kept = rank", quiet=True)
        except (KeyboardInterrupt, CellInterruptedError):
            pass
        finally:
            sys.settrace(before)
        if not group.is_live:
            group.start()
        group.run(MEET, quiet=True)
        group.stop()
        group.close()
        return stop.was_sent

    yield stop_at
    for group in groups:
        group.close()


def last_place(stopped_at: Callable[[int], bool]) -> int:
    """About how many places there are; at most twice as many."""
    places = 64
    while stopped_at(places):
        places *= 2
    return places


@pytest.mark.parametrize(
    "most",
    [
        pytest.param(60, id="some", marks=pytest.mark.full),
        pytest.param(1_000_000, id="every", marks=pytest.mark.soak),
    ],
)
def test_interrupt_at_any_point_of_start_and_first_cell(
    stopped_at: Callable[[int], bool], most: int
) -> None:
    places = last_place(stopped_at)
    for place in random.Random(7).sample(range(places), min(most, places)):
        stopped_at(place)
