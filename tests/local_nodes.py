"""Nodes that all run on this machine, with separate processes, and a group on them."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from drivers.extensions import open_pool
from drivers.ranks import Ranks, new_launcher
from processes import wait_until
from slow_link import Link
from virtual_networks import Cables

from nbddp.extensions.nodes.node_pool import NodePool, NodesSpec

CONNECT_TIMEOUT = 120.0  # seconds for agents to import torch and connect
ORPHAN_TIMEOUT = 20.0  # seconds that a node agent waits for a lost listener


def is_process_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def process_tree(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def all_ended(processes: list[psutil.Process], *, timeout: float = 40.0) -> bool:
    return wait_until(lambda: not any(map(is_process_running, processes)), timeout=timeout)


class OnNodes:
    """A group on nodes, and its messages."""

    def __init__(
        self, *, least: int = 2, most: int = 2, nproc_per_node: int = 2, host: str = "127.0.0.1"
    ) -> None:
        # grace: surviving ranks on two busy cores answer slowly
        self.group = Ranks(nproc=1, launcher=new_launcher(), grace=20.0)
        spec = NodesSpec(host=host, min_nodes=least, max_nodes=most, nproc_per_node=nproc_per_node)
        self.nodes: NodePool = open_pool(self.group, spec)
        self.node_agents: list[subprocess.Popen[bytes]] = []
        self._links: list[Link] = []

    @property
    def messages(self) -> list[str]:
        events = self.group.events()
        return [event.describe() for event in events if event.kind == "node"]

    def start(self, count: int = 2) -> Ranks:
        self.bring(count)
        return self.start_ranks()

    def start_ranks(self) -> Ranks:
        self.group.spec = self.nodes.fit(self.group.spec)
        self.group.start()
        return self.group

    def restart_ranks(self) -> Ranks:
        self.group.spec = self.nodes.fit(self.group.spec)
        self.group.restart()
        return self.group

    def bring(self, count: int = 1) -> None:
        enough = len(self.nodes.listener.nodes) + count
        self.nodes.start_local(count)
        self.await_nodes(enough)

    def await_nodes(self, count: int) -> None:
        assert wait_until(lambda: len(self.nodes.listener.nodes) == count, timeout=CONNECT_TIMEOUT)

    def start_node_agent(
        self,
        nproc: int,
        *options: str,
        port: int | None = None,
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        with_agent: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Connect a node; without torchrun's agent it takes a quarter of the time."""
        enough = len(self.nodes.listener.nodes) + 1
        join = self.nodes.listener.join
        number = len(self.node_agents)
        folder = Path.home() / f"node{number}"
        file = replace(join, port=port or join.port).save(folder)
        agent = ["-m", "torch.distributed.run", "--master-addr=127.0.0.1", "--master-port=0"]
        command = [sys.executable, *(agent if with_agent else ()), "-m", "nbddp.nodes"]
        command += ["--join", str(file), "--ranks", str(nproc), "--folder", str(folder / "logs")]
        command += ["--orphan-timeout", str(ORPHAN_TIMEOUT), *options]
        node_agent = subprocess.Popen([*prefix, *command], start_new_session=True, env=env)
        self.node_agents.append(node_agent)
        self.await_nodes(enough)
        return node_agent

    def link(self, *, delay: float = 0.0) -> Link:
        """Return a proxy to the listener; it closes with the listener."""
        self._links.append(Link(self.nodes.listener.join.port, delay=delay))
        return self._links[-1]

    def node_of(self, rank: int) -> Any:
        return self.nodes.launcher.assignment_of(rank).node

    def agent_of(self, rank: int) -> psutil.Process:
        return self.agent_at(self.node_of(rank))

    def agent_at(self, node: Any) -> psutil.Process:
        agent = psutil.Process(node.facts["pid"]).parent()
        assert agent is not None
        return agent

    def close(self) -> None:
        """End the group and the listener; agents and node agents end with the listener."""
        self.group.close()
        for node_agent in self.node_agents:
            node_agent.wait(60)
        for link in self._links:
            link.close()


class SeparateNetworks(OnNodes):
    """A group on nodes with separate networks and cables that can be cut; needs root."""

    def __init__(self) -> None:
        self.cables = Cables(f"nb{os.getpid() % 100_000}x")
        super().__init__(host=self.cables.address)

    def connect_separate_node(self, *options: str, with_agent: bool = False) -> str:
        """Connect a node of two ranks. Return its network namespace."""
        space = self.cables.add()
        prefix = self.cables.inside(space)
        self.start_node_agent(2, *options, prefix=prefix, with_agent=with_agent)
        return space

    def close(self) -> None:
        """End the group and the nodes, and remove the networks."""
        super().close()
        self.cables.close()
