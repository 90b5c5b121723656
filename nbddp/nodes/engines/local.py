"""Agents of torchrun that are started on this machine: nodes to learn and to test with."""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nbddp.errors import describe_exit
from nbddp.nodes.listener import Node
from nbddp.sigint import sigint_deferred
from nbddp.topology import TORCHRUN

# The options of an agent that meets no other agent, at any free port, and starts one process. If an
# option is missing, torchrun reads it from a variable PET_...; Kubeflow sets them in each pod.
SINGLE_NODE_OPTIONS = (
    "--nnodes=1",
    "--node-rank=0",
    "--rdzv-backend=static",
    "--rdzv-endpoint=127.0.0.1:0",
    "--nproc-per-node=1",
)
EXIT_TIMEOUT = 15.0  # seconds that agents get to end
_LOG_PREFIX = "nbddp: "  # what the lines of a log begin with that are not torchrun's


@dataclass(slots=True)
class _Agent:
    process: subprocess.Popen[bytes]
    log: Path
    has_joined: bool = False


class LocalAgents:
    """Those that one door has here.

    Args:
        command: what follows ``torchrun`` on the command line.
        log: the beginning of the name of each one's log.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = [*TORCHRUN, *command]
        self._log = log
        self._agents: list[_Agent] = []

    def start(self, count: int) -> None:
        """Start so many, and do not wait for them."""
        self._log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(count):
            numbers = itertools.count(len(self._agents))
            paths = (self._log.with_name(f"{self._log.name}-{number}.log") for number in numbers)
            # the notebook before may have started agents, too
            path = next(path for path in paths if not path.exists())
            # an agent that is not in the list would keep running
            with sigint_deferred(), path.open("xb") as log:
                with suppress(OSError):  # no locks here
                    fcntl.flock(log, fcntl.LOCK_EX)  # goes with it: held as long as it lives
                process = subprocess.Popen(
                    self._command,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},  # else torchrun warns of it
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Jupyter's interrupt is not for it
                )
                self._agents.append(_Agent(process, path))

    def on_node_joined(self, node: Node) -> None:
        """A node has come in, which may be one of these."""
        if node.facts["host"] == socket.gethostname():
            for agent in self._agents:
                agent.has_joined = agent.has_joined or agent.process.pid == node.facts.get("agent")

    @property
    def pending(self) -> int:
        """How many run and are still to come in."""
        return sum(not each.has_joined and each.process.poll() is None for each in self._agents)

    def pop_failures(self) -> str:
        """What became of those that ended before they came in, once; empty if none did."""
        said = []
        for each in self._agents:
            if not each.has_joined and each.process.poll() is not None:
                each.has_joined = True  # nobody waits for it, and nobody is told again
                said.append(_describe_exit(each))
        return "; ".join(said)

    def close(self) -> None:
        """Wait until they have ended, as all nodes were sent home; end those that do not.

        Nobody has sent those home that were still on their way.
        """
        for agent in self._agents:
            if not agent.has_joined:
                agent.process.terminate()
        deadline = time.monotonic() + EXIT_TIMEOUT
        for agent in self._agents:
            try:
                agent.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.process.terminate()  # torchrun ends what it started
                agent.process.wait(EXIT_TIMEOUT)
        self._agents.clear()


def _describe_exit(agent: _Agent) -> str:
    how = describe_exit(agent.process.returncode)
    lines = agent.log.read_text(errors="replace").splitlines()
    why = next(
        (line[len(_LOG_PREFIX) :] for line in reversed(lines) if line.startswith(_LOG_PREFIX)), ""
    )
    said = f": {why}" if why else ""
    return f"an agent on this machine {how} before it came in{said}; its log is {agent.log}"
