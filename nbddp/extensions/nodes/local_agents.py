"""Start torchrun's agents on this machine, to learn and test with several nodes."""

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

from nbddp.extensions.nodes.listener import Node
from nbddp.formatting import describe_exit
from nbddp.sigint import sigint_deferred
from nbddp.topology import TORCHRUN

# Options of an agent that is alone, uses any free port, and starts one process. If an option
# is missing, torchrun reads it from a variable PET_...; Kubeflow sets them in each pod.
SINGLE_NODE_OPTIONS = (
    "--nnodes=1",
    "--node-rank=0",
    "--rdzv-backend=static",
    "--rdzv-endpoint=127.0.0.1:0",
    "--nproc-per-node=1",
)
EXIT_TIMEOUT = 15.0  # seconds for agents to exit
_LOG_PREFIX = "nbddp: "  # prefix of log lines that are not torchrun's


@dataclass(slots=True)
class _Agent:
    process: subprocess.Popen[bytes]
    log: Path
    has_joined: bool = False


class LocalAgents:
    """The agents of one listener on this machine.

    Args:
        command: the arguments of ``torchrun``.
        log: the common beginning of the paths of their logs.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = [*TORCHRUN, *command]
        self._log = log
        self._agents: list[_Agent] = []

    def start(self, count: int) -> None:
        """Start agents, and do not wait for them to join."""
        self._log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(count):
            numbers = itertools.count(len(self._agents))
            paths = (self._log.with_name(f"{self._log.name}-{number}.log") for number in numbers)
            # an earlier notebook may have started agents, too
            path = next(path for path in paths if not path.exists())
            # an interrupt here could lose an agent that keeps running
            with sigint_deferred(), path.open("xb") as log:
                with suppress(OSError):  # no locks here
                    # inherited: the lock lasts as long as the agent
                    fcntl.flock(log, fcntl.LOCK_EX)
                process = subprocess.Popen(
                    self._command,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},  # else torchrun warns about it
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # keeps Jupyter's interrupt away
                )
                self._agents.append(_Agent(process, path))

    def on_node_joined(self, node: Node) -> None:
        """Mark the agent of a node as joined, if it is one of these."""
        if node.facts["host"] == socket.gethostname():
            for agent in self._agents:
                agent.has_joined = agent.has_joined or agent.process.pid == node.facts.get("agent")

    @property
    def pending(self) -> int:
        """The number of agents that are running and have not joined yet."""
        return sum(not each.has_joined and each.process.poll() is None for each in self._agents)

    def pop_failures(self) -> str:
        """Describe the agents that exited before they joined, each once; empty if none did."""
        failures = []
        for agent in self._agents:
            if not agent.has_joined and agent.process.poll() is not None:
                agent.has_joined = True  # report it only once
                failures.append(_describe_exit(agent))
        return "; ".join(failures)

    def close(self) -> None:
        """Wait until all agents have exited, as their nodes were released; terminate late ones.

        Agents that have not joined were not released, so they are terminated at once.
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
    suffix = f": {why}" if why else ""
    return f"an agent on this machine {how} before it joined{suffix}; its log is {agent.log}"
