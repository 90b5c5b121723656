"""Gloo can lose a send when its peer dies: nbddp frees the rank that waits for it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from threading import Thread

import pytest
from drivers.ranks import MakeRanks
from processes import wait_until

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

# Rank 0 is suspended while rank 1 asks for two messages and dies. Its Gloo then writes the first
# message into a dead connection, which resets it, and cannot write the second.
LOSES_A_SEND = """
import os, signal, time
from pathlib import Path
kept, asks = ["kept by", rank], Path("asks")
if rank == 0:
    works = [dist.isend(torch.ones(10), 1) for _ in range(2)]
    Path("pid").write_text(str(os.getpid()))
    while not asks.exists():
        time.sleep(0.01)
    for work in works:
        work.wait()
if rank == 1:
    while not Path("pid").exists() or not (pid := Path("pid").read_text()):
        time.sleep(0.01)
    os.kill(int(pid), signal.SIGSTOP)
    wanted = [dist.irecv(torch.zeros(10), 0) for _ in range(2)]
    asks.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("nproc", [2, 3])
def test_rank_waiting_for_a_lost_send_keeps_its_names(
    make_group: MakeRanks, folder: Path, nproc: int
) -> None:
    group = make_group(nproc, grace=60)  # seconds until an unresponsive rank is killed
    pids = group.pids

    def wake_when_rank_1_is_dead() -> None:
        wait_until(lambda: (folder / "asks").exists(), timeout=60)
        wait_until(lambda: not Path(f"/proc/{pids[1]}").exists(), timeout=60)
        os.kill(pids[0], signal.SIGCONT)

    waking = Thread(target=wake_when_rank_1_is_dead)
    waking.start()
    failed = group.failure_of(LOSES_A_SEND, quiet=True)
    waking.join()
    assert failed.rank == 1
    assert set(group.alive) == {*range(nproc)} - {1}, failed.report
    assert group.heal().ranks == (1,)
    kept = group.evaluate("dist.barrier()\nkept")
    assert kept[0] == kept[1] == ["kept by", 0], "the new one has those of rank 0"
    assert [rank for rank in pids if group.pids[rank] != pids[rank]] == [1]
