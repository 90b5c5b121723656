"""Ten thousand strangers at the door while a cell runs: none comes in, and nobody is disturbed."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import forgers
import psutil
import pytest
from limits import set_limits
from listening import listening
from nodes_here import OnNodes
from processes import wait_until

pytestmark = [pytest.mark.full, pytest.mark.multiproc, pytest.mark.timeout(400)]

MANY = 10_000
MORE = 64 << 20  # bytes; that many connections, none let go of, hold gigabytes
NUMBERS = """
import os, time
step = 0
flag = torch.zeros(1)
while not flag.item():
    step += 1
    total = torch.tensor(float(rank + step))
    dist.all_reduce(total)
    assert total.item() == 1 + 2 * step, (total, step)
    nbddp.log(step=step, total=total.item())
    time.sleep(0.005)
    flag.fill_(os.path.exists(stop))
    dist.all_reduce(flag)
step > 10
"""


@pytest.fixture
def on_nodes(make_nodes: Callable[..., OnNodes]) -> OnNodes:
    return make_nodes(least=1, most=1)


def forge(on_nodes: OnNodes, count: int, recorded: Path) -> None:
    """Have so many come; none is told anything, and all are counted."""
    door = on_nodes.nodes.door
    before = door.refused
    command = [sys.executable, forgers.__file__, str(door.join.port), str(count), str(recorded)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert wait_until(lambda: door.refused == before + count), door.refused - before


def test_ten_thousand_forged_messages_disturb_nobody(
    on_nodes: OnNodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    door = on_nodes.nodes.door
    link = on_nodes.link()
    on_nodes.bring_keeper(2, port=link.port)
    group = on_nodes.start_ranks()
    group.run("dist.barrier()\nprint('hello')\nnbddp.log(step=0, total=0)", quiet=True)
    # for those that say nothing; a node of ours may take its time, and is here by now
    set_limits(monkeypatch, door_greeting=2.0)
    recorded, stop = tmp_path / "recorded", tmp_path / "stop"
    recorded.write_bytes(link.said[0])  # it came in, and ranks met: now again by strangers
    group.push({"stop": str(stop)})
    me, pids = psutil.Process(), group.pids
    forge(on_nodes, 500, recorded)  # what is made once is there
    gc.collect()
    descriptors, held = me.num_fds(), me.memory_info().rss

    def come() -> None:
        try:
            forge(on_nodes, MANY, recorded)
            assert listening(os.getpid()) == {"127.0.0.1"}
        except BaseException as error:  # noqa: BLE001 - for the test to raise
            failed.append(error)
        stop.touch()

    failed: list[BaseException] = []
    coming = threading.Thread(target=come)
    coming.start()
    result = group.run(NUMBERS, quiet=True, wants_value=True)
    coming.join()
    assert not failed
    assert result.values() == [True] * 2
    assert [said for said in on_nodes.said if "gone" in said] == []
    assert len(door.nodes) == 1
    assert group.pids == pids
    assert f" {MANY + 500} " in on_nodes.nodes.table()
    assert wait_until(lambda: me.num_fds() <= descriptors), (me.num_fds(), descriptors)
    gc.collect()
    assert me.memory_info().rss < held + MORE
