"""Nodes on separate networks: cut, slow, uneven, and forged messages."""

import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import listener_attacks
import psutil
import pytest
from conditions import when_cell_runs
from drivers.ranks import Capture, Ranks
from limits import limit, set_limits
from local_nodes import OnNodes, SeparateNetworks
from processes import wait_until
from slow_link import Link
from virtual_networks import NET, has_namespaces

from nbddp import CellFailedError, CellInterruptedError
from nbddp.errors import RequestError

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]


def listening(pid: int, *inside: str) -> set[str]:
    """Return the addresses on which a process listens, seen from ``inside`` its network."""
    sockets = subprocess.run([*inside, "ss", "-Hltnp"], check=True, capture_output=True, text=True)
    of_process = [line.split() for line in sockets.stdout.splitlines() if f"pid={pid}," in line]
    return {words[3].rpartition(":")[0] for words in of_process}


if not has_namespaces():
    pytest.skip("needs root, and network namespaces", allow_module_level=True)


@pytest.fixture
def apart(make_nodes: Callable[..., SeparateNetworks]) -> SeparateNetworks:
    return make_nodes(SeparateNetworks)


def test_ranks_on_two_networks_connect_and_a_cut_loses_one_node(apart: SeparateNetworks) -> None:
    spaces = [apart.connect_separate_node("--orphan-timeout=3", with_agent=True) for _ in range(2)]
    group = apart.start_ranks()
    assert [node.address for node in apart.nodes.listener.nodes] == [f"{NET}.2", f"{NET}.3"]
    hosts = group.evaluate(
        "import os\nmine = torch.ones(2) * rank\ndist.all_reduce(mine)\n"
        "mine.sum().item(), os.environ['MASTER_ADDR'], os.environ['GLOO_SOCKET_IFNAME']"
    )
    assert hosts == [(12.0, f"{NET}.2", "cable0")] * 4
    assert listening(os.getpid()) == {"127.0.0.1", f"{NET}.1"}
    for node, space, first in zip(apart.nodes.listener.nodes, spaces, (0, 2), strict=True):
        inside = apart.cables.inside(space)
        assert listening(node.facts["pid"], *inside) == {"127.0.0.1"}
        for rank in (first, first + 1):
            assert listening(group.pids[rank], *inside) <= {"127.0.0.1", node.address}
    survivors = {rank: group.pids[rank] for rank in (0, 1)}
    when_cell_runs(group, lambda: apart.cables.cut(spaces[1]))
    with pytest.raises(CellFailedError, match=r"\b5 s\b"):
        group.run("while True: dist.all_reduce(torch.ones(1000))")
    [told] = [said for said in apart.messages if "5 s" in said]
    assert f"({NET}.3)" in told
    assert "ranks 2-3" in told
    assert apart.node_agents[1].wait(60) == 1  # it ends itself: no command can reach it
    apart.connect_separate_node()
    group.heal()
    now = group.pids
    assert {rank: now[rank] for rank in (0, 1)} == survivors
    assert group.evaluate("mine.sum().item()") == [12.0] * 4
    group.run("dist.all_reduce(mine)")


def test_all_nodes_are_lost_in_a_partition_and_return(apart: SeparateNetworks) -> None:
    spaces = [apart.connect_separate_node("--orphan-timeout", "60") for _ in range(2)]
    group = apart.start_ranks()

    def cut() -> None:
        for space in spaces:
            apart.cables.cut(space)

    when_cell_runs(group, cut)
    with pytest.raises(CellFailedError, match=r"\b5 s\b"):
        group.run("while True: dist.all_reduce(torch.ones(1000))", quiet=True)
    assert wait_until(lambda: len(gone(apart)) == 2)
    for space in spaces:
        apart.cables.mend(space)
    apart.await_nodes(2)
    assert apart.restart_ranks().evaluate("dist.barrier()\nrank") == [0, 1, 2, 3]


SLOW = 0.2  # seconds each way
LINES = """
import time
began, count = time.monotonic(), 0
flag = torch.zeros(1)
while not flag.item():
    print("line", count, "of", rank)
    nbddp.log(step=count, value=count)
    count += 1
    time.sleep(0.05)
    flag.fill_(time.monotonic() - began > seconds)
    dist.all_reduce(flag)
count
"""


@pytest.fixture
def on_nodes(make_nodes: Callable[..., OnNodes]) -> OnNodes:
    made = make_nodes(nproc_per_node=1)
    made.start_node_agent(1)
    return made


def behind(on_nodes: OnNodes, link: Link) -> Ranks:
    on_nodes.start_node_agent(1, port=link.port)
    return on_nodes.start_ranks()


def gone(on_nodes: OnNodes) -> list[str]:
    return [said for said in on_nodes.messages if " gone" in said]


def test_slow_network_only_slows_cells_down(on_nodes: OnNodes, capsys: Capture) -> None:
    link = on_nodes.link(delay=SLOW)
    group = behind(on_nodes, link)
    group.push({"seconds": limit("node_silent_after") + 3})
    [count, _] = group.run(LINES, wants_value=True).values()
    output = capsys.readouterr().out
    for rank in (0, 1):
        found = re.findall(rf"^\[rank {rank}\] line (\d+) of {rank}$", output, re.MULTILINE)
        assert [int(each) for each in found] == list(range(count))
    group.push({"big": bytes(9 << 20)})
    assert [len(big) for big in group.pull("big")] == [9 << 20] * 2
    source = "print('begun')\nwhile True: dist.all_reduce(torch.ones(1))"
    with pytest.raises(CellInterruptedError):
        group.run_and_act(source, lambda output: output.count("begun") == 2, group.interrupt)
    group.kill(1)
    assert group.heal().ranks == (1,)
    assert group.evaluate("len(big)") == [9 << 20] * 2
    assert gone(on_nodes) == []
    assert re.search(r"\+?-?\d+\.\d ± [234]\d\d\.\d ms", on_nodes.nodes.table())


@pytest.mark.parametrize("cut_after", [None, 1, 1000, 100_000])
def test_node_reconnects_after_a_stall_or_a_cut_in_the_middle_of_a_frame(
    on_nodes: OnNodes, cut_after: int | None
) -> None:
    link = on_nodes.link()
    group = behind(on_nodes, link)
    group.run("kept = torch.ones(200_000)", quiet=True)
    survivor, name = group.pids[0], on_nodes.node_of(1).name
    when_cell_runs(group, link.stall if cut_after is None else lambda: link.cut(cut_after))
    with pytest.raises(CellFailedError) as caught:
        group.run("while True:\n    print('x' * 1000)\n    dist.all_reduce(kept)", quiet=True)
    assert f"node {name}: " in caught.value.report
    if cut_after is None:
        [told] = gone(on_nodes)
        assert all(words in told for words in (f"node {name} (127.0.0.1)", "5 s", "rank 1"))
        link.flow()
    on_nodes.await_nodes(2)
    assert group.heal().ranks == (1,)
    assert group.pids[0] == survivor
    assert group.evaluate("dist.barrier()\nlen(kept)") == [200_000] * 2


PLACES = """
import os
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE")
[os.environ[name] for name in names], (rank, local_rank, world_size), os.environ["MACHINE"]
"""


@pytest.fixture
def one_or_two(make_nodes: Callable[..., OnNodes]) -> OnNodes:
    return make_nodes(least=1, most=2)


def test_nodes_can_have_different_numbers_of_ranks(one_or_two: OnNodes) -> None:
    for nproc, threads in ((2, "1"), (1, "3")):
        env = os.environ | {"MACHINE": f"of {nproc}", "OMP_NUM_THREADS": threads}
        one_or_two.start_node_agent(nproc, env=env, with_agent=True)
    group = one_or_two.start_ranks()
    assert group.evaluate(PLACES) == [
        (["0", "0", "2", "0", "2", "3"], (0, 0, 3), "of 2"),
        (["1", "1", "2", "0", "2", "3"], (1, 1, 3), "of 2"),
        (["2", "0", "1", "1", "2", "3"], (2, 0, 3), "of 1"),
    ]
    cores = [node.facts["cores"] for node in one_or_two.nodes.listener.nodes]
    expected = [max(1, cores[0] // 2)] * 2 + [cores[1]]
    assert group.evaluate("torch.get_num_threads()") == expected
    group.assert_works()
    first, second = (node.name for node in one_or_two.nodes.listener.nodes)
    assert [each.node for each in group.snapshot().ranks] == [first, first, second]


def test_small_spare_node_replaces_no_larger_node_until_a_restart(one_or_two: OnNodes) -> None:
    lost = one_or_two.start_node_agent(2)
    for _ in range(2):  # the last is a spare
        one_or_two.start_node_agent(1)
    group = one_or_two.start_ranks()
    name = one_or_two.node_of(0).name
    one_or_two.nodes.release(name)
    lost.wait(30)
    assert wait_until(lambda: group.alive == [2])
    with pytest.raises(RequestError, match=f"node {name} "):
        group.heal()
    one_or_two.restart_ranks()
    assert group.evaluate("dist.barrier()\nrank, local_rank") == [(0, 0), (1, 0)]


MANY = 10_000
MORE = 64 << 20  # bytes; that many connections, none let go of, hold gigabytes
NUMBERS = """
import os, time
step = 0
total = torch.zeros(2)
while total[1] == 0:
    step += 1
    total = torch.tensor([rank + step, float(os.path.exists(stop))])
    dist.all_reduce(total)
    assert total[0] == 1 + 2 * step, (total, step)
    nbddp.log(step=step, total=step)
    time.sleep(0.005)
step > 10
"""


def forge(one_node: OnNodes, count: int, recorded: Path) -> None:
    """Run this many forged connections; check that all are counted and none is answered."""
    listener = one_node.nodes.listener
    before = listener.refused
    command = [sys.executable, listener_attacks.__file__, listener.join.port, count, recorded]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert wait_until(lambda: listener.refused == before + count), listener.refused - before


def test_ten_thousand_forged_messages_are_rejected(
    make_nodes: Callable[..., OnNodes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one_node = make_nodes(least=1, most=1)
    listener = one_node.nodes.listener
    link = one_node.link()
    one_node.start_node_agent(2, port=link.port)
    group = one_node.start_ranks()
    group.run("dist.barrier()\nprint('hello')\nnbddp.log(step=0, total=0)", quiet=True)
    # for silent clients; the real node is already connected
    set_limits(monkeypatch, handshake=2.0)
    recorded, stop = tmp_path / "recorded", tmp_path / "stop"
    recorded.write_bytes(link.received[0])  # a valid handshake, which the attackers replay
    group.push({"stop": str(stop)})
    me, pids = psutil.Process(), group.pids
    forge(one_node, 500, recorded)  # one-time allocations exist now
    gc.collect()
    descriptors, held = me.num_fds(), me.memory_info().rss

    def come() -> None:
        try:
            forge(one_node, MANY, recorded)
            assert listening(os.getpid()) == {"127.0.0.1"}
        finally:
            stop.touch()

    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(come)
        assert group.evaluate(NUMBERS) == [True] * 2
        coming.result()
    assert [said for said in one_node.messages if "gone" in said] == []
    assert len(listener.nodes) == 1
    assert group.pids == pids
    assert f" {MANY + 500:,} " in one_node.nodes.table()
    assert wait_until(lambda: me.num_fds() <= descriptors), (me.num_fds(), descriptors)
    gc.collect()
    assert me.memory_info().rss < held + MORE
