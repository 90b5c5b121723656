"""A node behind a slow cable, or one that stands still for a while: it is slow, not gone."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import pytest
from drivers.ranks import Ranks
from limits import limit, set_limits
from moments import run_and_act, when_cell_runs
from nodes_here import OnNodes
from processes import wait_until
from slow_link import Link

from nbddp import CellFailedError, CellInterruptedError

pytestmark = [pytest.mark.full, pytest.mark.multiproc, pytest.mark.timeout(300)]

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
    made.bring_keeper(1)
    return made


def behind(on_nodes: OnNodes, link: Link) -> Ranks:
    """Have a second node come in over this cable, and start the ranks."""
    on_nodes.bring_keeper(1, port=link.port)
    return on_nodes.start_ranks()


def gone(on_nodes: OnNodes) -> list[str]:
    """What was said of nodes that are gone."""
    return [said for said in on_nodes.said if " gone" in said]


def count_lines(group: Ranks, capsys: pytest.CaptureFixture[str], seconds: float) -> int:
    """Print lines for so long, and check that the user saw all of them. Return their number."""
    group.push({"seconds": seconds})
    [count, _] = group.run(LINES, wants_value=True).values()
    said = capsys.readouterr().out
    for rank in (0, 1):
        found = re.findall(rf"^\[rank {rank}\] line (\d+) of {rank}$", said, re.MULTILINE)
        assert [int(each) for each in found] == list(range(count))
    return int(count)


def test_a_slow_cable_makes_cells_slow_and_nothing_else(
    on_nodes: OnNodes, capsys: pytest.CaptureFixture[str]
) -> None:
    link = on_nodes.link(delay=SLOW)
    group = behind(on_nodes, link)
    count_lines(group, capsys, limit("node_silent_after") + 3)
    group.push({"big": bytes(9 << 20)})
    assert [len(big) for big in group.pull("big")] == [9 << 20] * 2
    source = "print('begun')\nwhile True: dist.all_reduce(torch.ones(1))"
    with pytest.raises(CellInterruptedError):
        run_and_act(group, source, lambda said: said.count("begun") == 2, group.interrupt)
    group.kill(1)
    assert group.heal().ranks == (1,)
    assert group.evaluate("len(big)") == [9 << 20] * 2
    assert gone(on_nodes) == []
    assert re.search(r"\+?-?\d+\.\d ± [234]\d\d\.\d ms", on_nodes.nodes.table())


def test_a_cable_that_stands_still_for_a_while_costs_that_while(
    on_nodes: OnNodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # beats come each second, and a slow machine is late with them
    set_limits(monkeypatch, node_silent_after=limit("node_silent_after") + 5.0)
    link = on_nodes.link()
    group = behind(on_nodes, link)
    pids = group.pids
    stalls = threading.Thread(target=_stall, args=[link, 3, limit("node_silent_after") - 2.0])
    stalls.start()
    count = count_lines(group, capsys, 3 * limit("node_silent_after"))
    stalls.join()
    assert wait_until(lambda: f"line {count - 1} of 1\n" in group.log(1).read_text())
    assert gone(on_nodes) == []
    assert group.pids == pids


def _stall(link: Link, times: int, seconds: float) -> None:
    for _ in range(times):
        time.sleep(1.5)
        link.stall()
        time.sleep(seconds)
        link.flow()


def test_a_cable_that_stands_still_for_too_long_costs_its_node_until_it_goes_on(
    on_nodes: OnNodes,
) -> None:
    link = on_nodes.link()
    group = behind(on_nodes, link)
    group.run("mine = [rank] * 30", quiet=True)
    survivor = group.pids[0]
    name = on_nodes.node_of(1).name
    when_cell_runs(group, link.stall)
    with pytest.raises(CellFailedError) as caught:
        group.run("while True: dist.all_reduce(torch.ones(1))", quiet=True)
    assert f"node {name}: " in caught.value.report
    [told] = gone(on_nodes)
    assert all(words in told for words in (f"node {name} (127.0.0.1)", "5 s", "rank 1"))
    link.flow()
    on_nodes.await_nodes(2)
    assert group.heal().ranks == (1,)
    assert group.pids[0] == survivor
    assert group.evaluate("dist.barrier()\nmine[0]") == [0, 0]


def test_a_cable_that_is_cut_in_the_middle_of_a_frame(on_nodes: OnNodes) -> None:
    link = on_nodes.link()
    group = behind(on_nodes, link)
    survivor = group.pids[0]
    for after in (1, 1000, 100_000):
        group.run("kept = torch.ones(200_000)", quiet=True)
        when_cell_runs(group, lambda after=after: link.cut(after))
        with pytest.raises(CellFailedError, match=r"node \S+: "):
            group.run("while True: print('x' * 1000)\n", quiet=True)
        on_nodes.await_nodes(2)
        assert group.heal().ranks == (1,)
        assert group.pids[0] == survivor
        assert group.evaluate("dist.all_reduce(kept)\nkept.sum().item()") == [400_000.0] * 2
