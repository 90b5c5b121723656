"""An interrupt at any point of a heal aborts it or comes too late; the group stays usable."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator

import pytest
from drivers.inside import imported
from drivers.ranks import Ranks
from interrupt_places import Stop
from notebook import Notebook

from nbddp.controller.session import Session

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.timeout(400),
    # CPython reports and drops an interrupt in the callback of a weak reference
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SHARES_KERNEL = True

BEGINS = 8  # among the places after this one it does, and is not waited for yet
MEET = "x = torch.ones(1); dist.all_reduce(x); assert (int(x), kept) == (2, 7)"


@pytest.fixture
def stopped_at(group: Ranks) -> Iterator[Callable[[int], bool]]:
    """Heals a group, with a stop at some place; whether there was such a place."""
    group.run("kept = 7", quiet=True)

    def stop_at(place: int) -> bool:
        group.kill(1)
        stop, before = Stop(place), sys.gettrace()
        try:
            sys.settrace(stop)
            group.heal()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert group.state in ("ready", "a rank is gone"), place
        if group.dead:
            group.heal()
        group.run(MEET, quiet=True)
        return stop.was_sent

    return stop_at


def test_interrupt_at_any_point_of_a_heal(stopped_at: Callable[[int], bool]) -> None:
    for place in range(BEGINS, BEGINS + 20, 2):
        assert stopped_at(place)
    for place in random.Random(7).sample(range(BEGINS + 20, 400), 4):
        stopped_at(place)


STOPPED_AS_IT_BEGAN = f"""
import signal
{imported(Session)}begin = Session.request_heal
def stopped(self, *who):
    Session.request_heal = begin
    begun = begin(self, *who)
    for _ in range({{times}}):
        signal.raise_signal(signal.SIGINT)
    return begun
Session.request_heal = stopped
"""


@pytest.mark.gate_runs("3")
@pytest.mark.parametrize("times", [1, 3])
def test_heal_interrupted_at_its_beginning_is_aborted(notebook: Notebook, times: int) -> None:
    notebook.run("%%ddp --nproc 2\nkept = 7")
    notebook.run("%ddp kill 1")
    notebook.run(STOPPED_AS_IT_BEGAN.format(times=times))
    error = notebook.run("%ddp heal").error
    for words in ("CommandInterruptedError: `%ddp heal` ", "rank 1", "%ddp restart", "--ranks 0"):
        assert words in error
    assert notebook.run("%ddp heal").status == "ok"
    assert notebook.run("%%ddp\nkept").text == "Out [ranks 0-1] 7\n"
