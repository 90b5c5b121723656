"""A death while the process group forms, or before a send, affects only the rank that dies."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from threading import Thread

import pytest
from drivers.ranks import Capture, MakeRanks, Ranks
from limits import set_limits
from processes import wait_until

# Rank 0 has told its address, which is above the others', so that Gloo leaves it to rank 0 to dial
# them; then it dies in the moment in which it would look up where they are.
DIES_BEFORE_IT_DIALS = """
import os, signal
c10d = dist.distributed_c10d

class LastStore(dist.Store):
    def __init__(self, store):
        super().__init__()
        self.store = store
    def set(self, key, value):
        self.store.set(key, value)
    def wait(self, *args):
        self.store.set("has told its address", "")
        os.kill(os.getpid(), signal.SIGKILL)
    get = multi_get = wait

def die_before_it_dials(store, rank, size, timeout, **_):
    options = real._Options()
    options._timeout = timeout
    options._devices = [real.create_device(hostname="127.0.0.2")]
    return real(LastStore(store), rank, size, options)

kept, real = rank, c10d.ProcessGroupGloo
if rank == 0: c10d.ProcessGroupGloo = die_before_it_dials
"""


@pytest.mark.parametrize(
    ("before", "cell"),
    [
        pytest.param("dist.destroy_process_group()", "dist.barrier()", id="group of all ranks"),
        pytest.param("pass", "dist.new_group([0, 1, 2])\ndist.barrier()", id="group of some"),
    ],
)
def test_death_before_connecting_keeps_the_names_of_other_ranks(
    make_group: MakeRanks, capsys: Capture, before: str, cell: str
) -> None:
    group = make_group(4)
    group.run(DIES_BEFORE_IT_DIALS)
    group.run(before)
    began = time.monotonic()
    error = group.failure_of(cell)
    assert time.monotonic() - began < 30  # the process group's timeout is half an hour
    assert re.fullmatch("rank 0 .*SIGKILL", str(error))
    assert re.findall("nbddp: rank .*", capsys.readouterr().out) == [f"nbddp: {error}"]
    assert group.alive == [1, 2, 3]
    assert group.evaluate("kept", ranks=[1, 2, 3]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("ranks", "who", "left"), [("(0,)", "rank 0", 5), ("(0, 1)", "ranks 0-1", 0)]
)
def test_rank_without_file_descriptors_fails_the_group_at_once(
    group: Ranks, monkeypatch: pytest.MonkeyPatch, ranks: str, who: str, left: int
) -> None:
    if who == "ranks 0-1":  # each has time to find it out
        set_limits(monkeypatch, peers_timeout=30.0)
    group.run(
        "import resource\nkept, opened = rank, []\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\ndist.destroy_process_group()\n"
        f"if rank in {ranks}:\n"
        "    try:\n        while True: opened.append(open('/dev/null'))\n"
        f"    except OSError: del opened[:{left}]"
    )
    for _ in range(2):
        error = str(group.failure_of("dist.barrier()"))
        assert re.match(f"{who}: OSError: .*Too many open files", error)
    group.run_cell("for each in opened: each.close()", needs_group=False)
    group.run("dist.barrier()")
    assert group.pull("kept") == [0, 1]


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


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
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
