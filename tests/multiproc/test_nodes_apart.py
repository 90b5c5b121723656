"""Nodes with a network of their own: other addresses, and a cable that can be cut.

Each is a network namespace with one cable to the notebook's; made and taken away here, by root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes import wait_until

from nbddp import CellFailedError
from nbddp.group.nodes import Nodes, NodesSpec
from nbddp.launch.launcher import LocalLauncher
from nbddp.magics.steered import SteeredGroup

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(180)]

NET = "10.207.83"  # nobody's, it is hoped


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Cables:
    """A switch on this machine, and a namespace for each node."""

    def __init__(self, name: str) -> None:
        self.switch = f"{name}s"
        self._name = name
        self._spaces: list[str] = []
        self.address = f"{NET}.1"
        ip("link", "add", self.switch, "type", "bridge")
        ip("addr", "add", f"{self.address}/24", "dev", self.switch)
        ip("link", "set", self.switch, "up")

    def add(self) -> str:
        """One more; its name."""
        number = len(self._spaces) + 2
        space = f"{self._name}{number}"
        ip("netns", "add", space)
        self._spaces.append(space)
        ip("link", "add", space, "type", "veth", "peer", "name", "cable0", "netns", space)
        ip("link", "set", space, "master", self.switch, "up")
        ip("-n", space, "addr", "add", f"{NET}.{number}/24", "dev", "cable0")
        ip("-n", space, "link", "set", "cable0", "up")
        ip("-n", space, "link", "set", "lo", "up")
        return space

    def cut(self, space: str) -> None:
        """Pull the cable out of the switch."""
        ip("link", "set", space, "down")

    def mend(self, space: str) -> None:
        """Put it in again."""
        ip("link", "set", space, "up")

    def close(self) -> None:
        """Take all of it away."""
        for space in self._spaces:
            subprocess.run(["ip", "link", "del", space], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.switch], check=False, capture_output=True)


def has_namespaces() -> bool:
    """Whether all of it can be made here; some containers allow namespaces and no bridge."""
    if os.getuid() or shutil.which("ip") is None:
        return False
    name = f"nbt{os.getpid() % 100_000}x"
    try:
        cables = Cables(name)
    except subprocess.CalledProcessError:
        subprocess.run(["ip", "link", "del", f"{name}s"], check=False, capture_output=True)
        return False
    try:
        cables.add()
    except subprocess.CalledProcessError:
        return False
    finally:
        cables.close()
    return True


if not has_namespaces():
    pytest.skip("needs root, and network namespaces", allow_module_level=True)


class Apart:
    """A group on nodes that have a network each."""

    def __init__(self, cables: Cables) -> None:
        self.cables = cables
        self.agents: list[subprocess.Popen[bytes]] = []
        self.group = SteeredGroup(nproc=1, launcher=LocalLauncher())
        spec = NodesSpec(host=cables.address, least=2, most=2, nproc_per_node=2)
        self.nodes: Nodes = self.group.open_nodes(spec)

    @property
    def said(self) -> list[str]:
        """What was said of nodes that came and went."""
        events = self.group.session.time_line.since(0.0)
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
        assert wait_until(lambda: len(self.nodes.door.nodes) == enough, timeout=60)
        return space

    def close(self) -> None:
        self.group.close()
        for agent in self.agents:
            agent.terminate()
            agent.wait(30)


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
    survivors = {rank: group.session.process_ids()[rank] for rank in (0, 1)}
    threading.Timer(1.0, apart.cables.cut, [spaces[1]]).start()
    with pytest.raises(CellFailedError) as caught:
        group.run("while True: dist.all_reduce(torch.ones(1000))")
    assert "no sign of life for 5 s" in caught.value.report
    [told] = [said for said in apart.said if "no sign" in said]
    assert told.endswith(f"({NET}.3): no sign of life for 5 s: ranks 2-3 are gone")
    assert apart.agents[1].wait(30) == 1  # it ends itself: nobody can tell it to
    apart.bring()
    group.heal()
    now = group.session.process_ids()
    assert {rank: now[rank] for rank in (0, 1)} == survivors
    assert group.run("mine.sum().item()", wants_value=True).values() == [12.0] * 4
    group.run("dist.all_reduce(mine)")


def test_a_node_that_was_cut_off_for_a_while_comes_back_as_a_spare(apart: Apart) -> None:
    group = apart.group
    spaces = [apart.bring(orphan_timeout=60) for _ in range(2)]
    group.spec = apart.nodes.fit(group.spec)
    group.start()
    group.run("mine = [rank]")
    survivors = {rank: group.session.process_ids()[rank] for rank in (0, 1)}
    lost = apart.nodes.door.nodes[1].facts["pid"]
    apart.cables.cut(spaces[1])
    with pytest.raises(CellFailedError, match="no sign of life for 5 s"):
        group.run("while True: dist.all_reduce(torch.ones(1000))")
    apart.cables.mend(spaces[1])
    assert wait_until(lambda: len(apart.nodes.door.nodes) == 2, timeout=30)
    assert apart.nodes.door.nodes[1].facts["pid"] == lost
    assert group.heal().ranks == (2, 3)
    now = group.session.process_ids()
    assert {rank: now[rank] for rank in (0, 1)} == survivors
    values = group.run("dist.all_reduce(torch.ones(1))\nmine", wants_value=True).values()
    assert values[:2] == [[0], [1]]
    its = [psutil.Process(lost), *psutil.Process(lost).children(recursive=True)]
    group.stop()
    assert wait_until(lambda: not any(each.is_running() for each in its))
