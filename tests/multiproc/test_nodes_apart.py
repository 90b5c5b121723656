"""Nodes with a network of their own: other addresses, and a cable that can be cut.

Each is a network namespace with one cable to the notebook's; made and taken away here, by root.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from cables import NET, has_namespaces
from listening import listening
from moments import when_cell_runs
from nodes_here import Apart

from nbddp import CellFailedError

pytestmark = [pytest.mark.full, pytest.mark.multiproc, pytest.mark.timeout(300)]

if not has_namespaces():
    pytest.skip("needs root, and network namespaces", allow_module_level=True)


@pytest.fixture
def apart(make_nodes: Callable[..., Apart]) -> Apart:
    return make_nodes(Apart)


def test_ranks_of_two_networks_meet_and_a_cut_cable_costs_its_node_alone(apart: Apart) -> None:
    spaces = [apart.bring_apart("--orphan-timeout=3", with_agent=True) for _ in range(2)]
    group = apart.start_ranks()
    assert [node.address for node in apart.nodes.door.nodes] == [f"{NET}.2", f"{NET}.3"]
    hosts = group.evaluate(
        "import os\nmine = torch.ones(2) * rank\ndist.all_reduce(mine)\n"
        "mine.sum().item(), os.environ['MASTER_ADDR'], os.environ['GLOO_SOCKET_IFNAME']"
    )
    assert hosts == [(12.0, f"{NET}.2", "cable0")] * 4
    assert listening(os.getpid()) == {"127.0.0.1", f"{NET}.1"}
    for node, ranks in zip(apart.nodes.door.nodes, ((0, 1), (2, 3)), strict=True):
        assert listening(node.facts["pid"]) == {"127.0.0.1"}
        for rank in ranks:
            assert listening(group.pids[rank]) <= {"127.0.0.1", node.address}
    survivors = {rank: group.pids[rank] for rank in (0, 1)}
    when_cell_runs(group, lambda: apart.cables.cut(spaces[1]))
    with pytest.raises(CellFailedError, match=r"\b5 s\b"):
        group.run("while True: dist.all_reduce(torch.ones(1000))")
    [told] = [said for said in apart.said if "5 s" in said]
    assert f"({NET}.3)" in told
    assert "ranks 2-3" in told
    assert apart.keepers[1].wait(60) == 1  # it ends itself: nobody can tell it to
    apart.bring_apart()
    group.heal()
    now = group.pids
    assert {rank: now[rank] for rank in (0, 1)} == survivors
    assert group.evaluate("mine.sum().item()") == [12.0] * 4
    group.run("dist.all_reduce(mine)")
