"""Nodes with a network of their own: other addresses, and a cable that can be cut.

Each is a network namespace with one cable to the notebook's; made and taken away here, by root.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import psutil
import pytest
from cables import NET, has_namespaces
from drivers.ranks import Ranks
from listening import listening
from moments import when_cell_runs
from nodes_here import Apart, all_ended, family
from processes import wait_until

from nbddp import CellFailedError

pytestmark = [pytest.mark.full, pytest.mark.multiproc, pytest.mark.timeout(300)]

if not has_namespaces():
    pytest.skip("needs root, and network namespaces", allow_module_level=True)


@pytest.fixture
def apart(make_nodes: Callable[..., Apart]) -> Apart:
    return make_nodes(Apart)


def lose(group: Ranks) -> None:
    """Run a cell until ranks are lost."""
    with pytest.raises(CellFailedError, match=r"\b5 s\b"):
        group.run("while True: dist.all_reduce(torch.ones(1000))")


def silent(apart: Apart) -> list[str]:
    """What was said of nodes from which nothing was heard, sorted."""
    return sorted(said for said in apart.said if "5 s" in said)


def test_ranks_of_two_networks_meet_and_a_cut_cable_costs_its_node_alone(apart: Apart) -> None:
    spaces = [apart.bring_apart("--orphan-timeout=3", with_agent=True) for _ in range(2)]
    group = apart.start_ranks()
    assert [node.address for node in apart.nodes.door.nodes] == [f"{NET}.2", f"{NET}.3"]
    hosts = group.evaluate(
        "import os\nmine = torch.ones(2) * rank\ndist.all_reduce(mine)\n"
        "mine.sum().item(), os.environ['MASTER_ADDR'], os.environ['GLOO_SOCKET_IFNAME']"
    )
    assert hosts == [(12.0, f"{NET}.2", "cable0")] * 4
    survivors = {rank: group.pids[rank] for rank in (0, 1)}
    when_cell_runs(group, lambda: apart.cables.cut(spaces[1]))
    lose(group)
    [told] = silent(apart)
    assert f"({NET}.3)" in told
    assert "ranks 2-3" in told
    assert apart.keepers[1].wait(60) == 1  # it ends itself: nobody can tell it to
    apart.bring_apart()
    group.heal()
    now = group.pids
    assert {rank: now[rank] for rank in (0, 1)} == survivors
    assert group.evaluate("mine.sum().item()") == [12.0] * 4
    group.run("dist.all_reduce(mine)")


def test_a_node_that_was_cut_off_for_a_while_comes_back_as_a_spare(apart: Apart) -> None:
    spaces = [apart.bring_apart("--orphan-timeout=60") for _ in range(2)]
    group = apart.start_ranks()
    group.run("mine = [rank]")
    survivors = {rank: group.pids[rank] for rank in (0, 1)}
    lost = apart.nodes.door.nodes[1].facts["pid"]
    apart.cables.cut(spaces[1])
    lose(group)
    apart.cables.mend(spaces[1])
    apart.await_nodes(2)
    assert apart.nodes.door.nodes[1].facts["pid"] == lost
    assert group.heal().ranks == (2, 3)
    now = group.pids
    assert {rank: now[rank] for rank in (0, 1)} == survivors
    assert group.evaluate("dist.all_reduce(torch.ones(1))\nmine")[:2] == [[0], [1]]
    its = family(psutil.Process(lost))
    group.stop()
    assert all_ended(its)


def test_a_notebook_that_was_cut_off_from_all_nodes_gets_them_back(apart: Apart) -> None:
    spaces = [apart.bring_apart("--orphan-timeout=60") for _ in range(2)]
    group = apart.start_ranks()
    group.run("dist.barrier()")
    assert listening(os.getpid()) == {"127.0.0.1", f"{NET}.1"}
    for node, ranks in zip(apart.nodes.door.nodes, ((0, 1), (2, 3)), strict=True):
        assert listening(node.facts["pid"]) == {"127.0.0.1"}
        for rank in ranks:
            assert listening(group.pids[rank]) <= {"127.0.0.1", node.address}
    for space in spaces:
        apart.cables.cut(space)
    lose(group)
    assert wait_until(lambda: len(silent(apart)) == 2)
    assert not apart.nodes.door.nodes
    for told, words in zip(silent(apart), ((2, "ranks 0-1"), (3, "ranks 2-3")), strict=True):
        assert f"({NET}.{words[0]})" in told
        assert words[1] in told
    for space in spaces:
        apart.cables.mend(space)
    apart.await_nodes(2)
    group.restart()
    assert group.evaluate("dist.barrier()\nrank") == [0, 1, 2, 3]
