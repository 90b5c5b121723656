"""Nodes with a network of their own: other addresses, and a cable that can be cut.

Each is a network namespace with one cable to the notebook's; made and taken away here, by root.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cables import NET, Cables, has_namespaces
from drivers.ranks import Ranks, new_launcher
from listening import listening
from moments import when_cell_runs
from nodes_here import lives
from processes import wait_until

from nbddp import CellFailedError
from nbddp.group.nodes import Nodes, NodesSpec

pytestmark = [pytest.mark.full, pytest.mark.multiproc, pytest.mark.timeout(300)]

if not has_namespaces():
    pytest.skip("needs root, and network namespaces", allow_module_level=True)


class Apart:
    """A group on nodes that have a network each."""

    def __init__(self, cables: Cables) -> None:
        self.cables = cables
        self.agents: list[subprocess.Popen[bytes]] = []
        self.group = Ranks(nproc=1, launcher=new_launcher(), grace=20.0)
        spec = NodesSpec(host=cables.address, least=2, most=2, nproc_per_node=2)
        self.nodes: Nodes = self.group.open_nodes(spec)

    @property
    def said(self) -> list[str]:
        """What was said of nodes that came and went."""
        events = self.group.events()
        return [str(event.facts["what"]) for event in events if event.kind == "node"]

    def bring(self, *, orphan_timeout: float = 3.0) -> str:
        """Have a node come in; its namespace."""
        enough = len(self.nodes.door.nodes) + 1
        space = self.cables.add()
        inside = ["ip", "netns", "exec", space, sys.executable, "-m", "torch.distributed.run"]
        options = ["--master-addr=127.0.0.1", "--master-port=0", "--nproc-per-node=2"]
        join = ["-m", "nbddp.worker", "--join", str(self.nodes.join_file)]
        join += ["--orphan-timeout", str(orphan_timeout)]
        self.agents.append(subprocess.Popen([*inside, *options, *join], start_new_session=True))
        assert wait_until(lambda: len(self.nodes.door.nodes) == enough, timeout=120)
        return space

    def close(self) -> None:
        self.group.close()
        for agent in self.agents:
            agent.terminate()
            agent.wait(60)


@pytest.fixture
def apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Apart]:
    monkeypatch.setenv("HOME", str(folder))
    cables = Cables(f"nb{os.getpid() % 100_000}x")
    made = Apart(cables)
    yield made
    made.close()
    cables.close()


def test_ranks_of_two_networks_meet_and_a_cut_cable_costs_its_node_alone(apart: Apart) -> None:
    group = apart.group
    spaces = [apart.bring() for _ in range(2)]
    group.spec = apart.nodes.fit(group.spec)
    group.start()
    assert [node.address for node in apart.nodes.door.nodes] == [f"{NET}.2", f"{NET}.3"]
    hosts = group.run(
        "import os\nmine = torch.ones(2) * rank\ndist.all_reduce(mine)\n"
        "mine.sum().item(), os.environ['MASTER_ADDR'], os.environ['GLOO_SOCKET_IFNAME']",
        wants_value=True,
    ).values()
    assert hosts == [(12.0, f"{NET}.2", "cable0")] * 4
    survivors = {rank: group.pids[rank] for rank in (0, 1)}
    when_cell_runs(group, lambda: apart.cables.cut(spaces[1]))
    with pytest.raises(CellFailedError) as caught:
        group.run("while True: dist.all_reduce(torch.ones(1000))")
    assert "no sign of life for 5 s" in caught.value.report
    [told] = [said for said in apart.said if "no sign" in said]
    assert told.endswith(f"({NET}.3): no sign of life for 5 s: ranks 2-3 are gone")
    assert apart.agents[1].wait(60) == 1  # it ends itself: nobody can tell it to
    apart.bring()
    group.heal()
    now = group.pids
    assert {rank: now[rank] for rank in (0, 1)} == survivors
    assert group.run("mine.sum().item()", wants_value=True).values() == [12.0] * 4
    group.run("dist.all_reduce(mine)")


def test_a_node_that_was_cut_off_for_a_while_comes_back_as_a_spare(apart: Apart) -> None:
    group = apart.group
    spaces = [apart.bring(orphan_timeout=60) for _ in range(2)]
    group.spec = apart.nodes.fit(group.spec)
    group.start()
    group.run("mine = [rank]")
    survivors = {rank: group.pids[rank] for rank in (0, 1)}
    lost = apart.nodes.door.nodes[1].facts["pid"]
    apart.cables.cut(spaces[1])
    with pytest.raises(CellFailedError, match="no sign of life for 5 s"):
        group.run("while True: dist.all_reduce(torch.ones(1000))")
    apart.cables.mend(spaces[1])
    assert wait_until(lambda: len(apart.nodes.door.nodes) == 2, timeout=60)
    assert apart.nodes.door.nodes[1].facts["pid"] == lost
    assert group.heal().ranks == (2, 3)
    now = group.pids
    assert {rank: now[rank] for rank in (0, 1)} == survivors
    values = group.run("dist.all_reduce(torch.ones(1))\nmine", wants_value=True).values()
    assert values[:2] == [[0], [1]]
    its = [psutil.Process(lost), *psutil.Process(lost).children(recursive=True)]
    group.stop()
    assert wait_until(lambda: not any(map(lives, its)))


def test_a_notebook_that_was_cut_off_from_all_nodes_gets_them_back(apart: Apart) -> None:
    group = apart.group
    spaces = [apart.bring(orphan_timeout=60) for _ in range(2)]
    group.spec = apart.nodes.fit(group.spec)
    group.start()
    group.run("dist.barrier()")
    assert listening(os.getpid()) == {"127.0.0.1", f"{NET}.1"}
    for node, ranks in zip(apart.nodes.door.nodes, ((0, 1), (2, 3)), strict=True):
        assert listening(node.facts["pid"]) == {"127.0.0.1"}
        for rank in ranks:
            assert listening(group.pids[rank]) <= {"127.0.0.1", node.address}
    for space in spaces:
        apart.cables.cut(space)
    with pytest.raises(CellFailedError, match="no sign of life for 5 s"):
        group.run("while True: dist.all_reduce(torch.ones(1000))")
    assert wait_until(lambda: sum("no sign" in said for said in apart.said) == 2)
    assert not apart.nodes.door.nodes
    told = sorted(said for said in apart.said if "no sign" in said)
    ends = [f"({NET}.2): no sign of life for 5 s: ranks 0-1 are gone"]
    ends += [f"({NET}.3): no sign of life for 5 s: ranks 2-3 are gone"]
    assert [said.rpartition(" (")[1:][1] for said in told] == [end[1:] for end in ends]
    for space in spaces:
        apart.cables.mend(space)
    assert wait_until(lambda: len(apart.nodes.door.nodes) == 2, timeout=60)
    group.restart()
    assert group.run("dist.barrier()\nrank", wants_value=True).values() == [0, 1, 2, 3]
