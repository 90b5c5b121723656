"""A new rank dies while it is given much: whoever was sending to it is free again."""

from __future__ import annotations

import os
import signal
from threading import Thread

import psutil
import pytest
from drivers.ranks import Ranks
from processes import wait_until
from trained import kill

from nbddp.errors import RequestError

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(240)]

FLOATS = 60_000_000
ROUNDS = 5


@pytest.mark.full
def test_a_newcomer_that_dies_while_it_is_given_much_keeps_nobody_waiting() -> None:
    """Gloo does not always wake who was sending to it: about every third time it does not."""
    with Ranks(nproc=3) as group:
        group.run(f"much = torch.ones({FLOATS})", quiet=True)
        for _ in range(ROUNDS):
            gone = group.pids[1]
            kill(group, 1)
            assert "did not come back" not in _healed_in_vain(group, gone)
            assert group.heal().ranks == (1,)
        assert group.evaluate("much.sum().item()") == [FLOATS] * 3


def _healed_in_vain(group: Ranks, gone: int) -> str:
    """Kill the new rank when it has a part of what it is given. Return why the heal failed."""
    failed: list[str] = []

    def heal() -> None:
        try:
            group.heal()
        except RequestError as error:
            failed.append(str(error))

    while not failed:  # again, where the heal was quicker than this
        healing = Thread(target=heal)
        healing.start()
        # a rank that is about to come has the process id of the one before it
        assert wait_until(lambda gone=gone: group.pids.get(1, gone) != gone)
        newcomer = psutil.Process(group.pids[1])
        empty = newcomer.memory_info().rss
        while newcomer.memory_info().rss < empty + FLOATS and healing.is_alive():
            pass  # it takes a moment only
        os.kill(newcomer.pid, signal.SIGKILL)
        healing.join(60)
        assert not healing.is_alive()
        assert wait_until(lambda: 1 not in group.alive)
        gone = newcomer.pid
    return failed[0]
