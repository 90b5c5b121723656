"""Waits outside collectives are reported as hangs, can be interrupted, and have a timeout."""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path

import pytest
from conditions import output_of_hang
from drivers.inside import imported
from drivers.ranks import Capture, MakeRanks, Ranks
from processes import wait_until

from nbddp import CellFailedError, CellInterruptedError
from nbddp.worker.process_group.process_group import newest_collective

pytestmark = pytest.mark.multiproc


@pytest.fixture
def group(group_here: Ranks) -> Ranks:
    return group_here


STORE = "dist.distributed_c10d._get_default_store()"
RECEIVE = "x = torch.ones(1)\nwork = dist.irecv(x, src=1 - rank)\nwork.wait()"
GET = f"store = {STORE}\nif rank == 0:\n    store.get('never')"


@pytest.mark.gate_runs("new_group", "tags", "store")
@pytest.mark.parametrize(
    ("source", "card"),
    [
        ("if rank == 0:\n    dist.new_group([0, 1])", r"rank 0 .*\bnew_group, line 2$"),
        (
            "dist.recv(torch.ones(1), src=1 - rank)",
            r"rank 0 .*\brecv\(src=1, tag=0\), line 1\n *"
            r"rank 1 .*\brecv\(src=0, tag=0\), line 1$",
        ),
        (
            "x = torch.ones(1)\nif rank: dist.send(x, 0, tag=6)\nelse: dist.recv(x, tag=5, src=1)",
            r": rank 0 .*\brecv\(src=1, tag=5\), rank 1 .*\bsend\(dst=0, tag=6\)\n",
        ),
        (RECEIVE, r"ranks 0-1 .*\bwork\.wait\(\), line 3$"),
        (GET, r"rank 0 .*\bstore\.get\('never'\), line 3$"),
    ],
    ids=["new_group", "recv", "tags", "irecv", "store"],
)
def test_deadlock_outside_the_flight_recorder_is_shown(
    group: Ranks, capsys: Capture, source: str, card: str
) -> None:
    group.run("kept = rank")
    text = output_of_hang(group, source, capsys)
    assert re.search(card, text, re.MULTILINE)
    group.run("dist.barrier()")
    assert group.pull("kept") == [0, 1]


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "function"),
    [
        ("dist.init_process_group()", "init_process_group"),
        (
            "from torch.distributed import rpc\nrpc.init_rpc('one', rank=rank, world_size=2)",
            "init_rpc",
        ),
    ],
    ids=["init_process_group", "init_rpc"],
)
def test_rendezvous_with_missing_ranks_is_explained(
    make_group: MakeRanks, capsys: Capture, source: str, function: str
) -> None:
    group = make_group(2, init=False)
    group.run("kept = rank")
    body = "\n".join(f"    {line}" for line in source.split("\n"))
    text = output_of_hang(group, f"if rank == 0:\n{body}", capsys)
    line = 1 + len(source.split("\n"))
    assert re.search(rf"rank 0 .*\b{function}, line {line}$", text, re.MULTILINE)
    group.run("pass")
    assert group.pull("kept") == [0, 1]


WAITS = "open(f'waits{rank}', 'w').close()"


def interrupted(group: Ranks, source: str) -> float:
    """Interrupt a cell soon after both ranks came to ``WAITS``; how long it took to end then."""
    marks, pressed = [Path(f"waits{rank}") for rank in range(2)], []
    for mark in marks:
        mark.unlink(missing_ok=True)

    def press() -> None:
        wait_until(lambda: all(mark.exists() for mark in marks), timeout=60.0)
        time.sleep(0.3)  # then it waits, on most machines
        pressed.append(time.monotonic())
        group.interrupt()

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(CellInterruptedError):
        group.run(source)
    presser.join()
    return time.monotonic() - pressed[0]


@pytest.mark.gate_runs("await")
@pytest.mark.parametrize(
    "source",
    [
        f"import asyncio\ntry:\n    {WAITS}\n    await asyncio.sleep(300)\n"
        "finally:\n    cleaned = True",
        f"import asyncio\n{WAITS}\nasyncio.run(asyncio.sleep(300))",
    ],
    ids=["await", "run"],
)
def test_interrupt_ends_an_await_at_once(group: Ranks, source: str) -> None:
    group.run("kept, cleaned = rank, False")
    assert interrupted(group, source) < 20  # it takes 0.1 s, not 60
    assert group.pull("kept") == [0, 1]
    assert group.pull("cleaned") == ["cleaned" in source] * 2
    group.run("import asyncio\nawait asyncio.sleep(0)\ndist.barrier()")


def test_interrupted_await_leaves_no_task_in_the_event_loop(group: Ranks) -> None:
    source = (
        "import asyncio\nseen = []\n"
        f"while True:\n    await asyncio.sleep(0.01)\n    seen.append(1)\n    {WAITS}"
    )
    interrupted(group, source)
    group.run("import asyncio\nbefore = len(seen)\nawait asyncio.sleep(0.2)\nafter = len(seen)")
    assert group.pull("before == after and before > 0") == [True, True]


@pytest.mark.gate_runs("recv")
@pytest.mark.parametrize(
    "receive",
    ["dist.recv(x, src=1)", "dist.irecv(x, src=1).wait()"],
    ids=["recv", "irecv"],
)
def test_timeout_applies_to_a_receive(make_group: MakeRanks, receive: str) -> None:
    group = make_group(2, timeout=4.0)  # the barrier below has no more time
    source = (
        f"import time\nx = torch.ones(1)\nif rank == 0:\n    {receive}\nelse:\n    time.sleep(60)"
    )
    began = time.monotonic()
    with pytest.raises(CellFailedError, match=r"rank 0: .*[Tt]imed out waiting 4000ms"):
        group.run(source)
    assert time.monotonic() - began < 30  # the group was made with 60
    group.run("dist.barrier()")


def test_receive_can_wait_longer_than_a_minute(group: Ranks) -> None:
    options = "dist.distributed_c10d._get_default_group()._get_backend(device).options"
    assert group.pull(f"{options}._timeout.total_seconds()") == [1800.0, 1800.0]


def test_interrupt_does_not_close_connections_of_the_user(group: Ranks) -> None:
    group.run(
        "import socket, time\nserver = socket.create_server(('127.0.0.1', 0))\n"
        "mine = socket.create_connection(server.getsockname())\nother, _ = server.accept()"
    )
    interrupted(group, f"{WAITS}\nif rank == 0: dist.barrier()\nelse: time.sleep(60)")
    group.run("mine.send(b'here')\nsaid = other.recv(4)")
    assert group.pull("said") == [b"here", b"here"]


@pytest.mark.skipif(sys.platform != "linux", reason="a C library's own wait")
def test_interrupt_ends_a_wait_in_c_on_a_user_connection(group: Ranks) -> None:
    source = (
        "import ctypes, socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
        "mine = socket.create_connection(server.getsockname())\nother, _ = server.accept()\n"
        "mine.setblocking(True)\nbuffer = ctypes.create_string_buffer(1)\n"
        "kept = rank\nend = None\nctypes.CDLL(None, use_errno=True)\n"
        f"recv = ctypes.CDLL(None).recv\n{WAITS}\n"
        "while end is None or end < 0: end = recv(mine.fileno(), buffer, 1, 0)"
    )
    assert interrupted(group, source) < 20
    assert group.pull("kept") == [0, 1]


def test_newest_collective_is_unknown_without_free_memory(group: Ranks) -> None:
    group.run(
        f"import resource\n{imported(newest_collective)}"
        "for _ in range(300): dist.barrier()\n"
        "assert newest_collective().call.number\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "limits, held = resource.getrlimit(resource.RLIMIT_AS), []\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 1_000_000, limits[1]))\n"
        "try:\n"
        "    for size in (1 << 16, 1 << 14):\n"
        "        try:\n            while True: held.append(bytearray(size))\n"
        "        except MemoryError: pass\n"
        "    found = newest_collective()\n"  # the record of 200 of them does not fit
        "finally:\n    held.clear()\n    resource.setrlimit(resource.RLIMIT_AS, limits)"
    )
    assert group.pull("found") == [None, None]
