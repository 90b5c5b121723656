"""Start parameters of ranks, scripts and the forkserver, and the names of queues.

This module does not import torch: the kernel imports it while torch is still being imported in the
background.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from nbddp.topology import Topology
from nbddp.wire.group_spec import GroupSpec

RANKS_QUEUE = "up"  # all ranks write messages to this queue
URGENT_QUEUE = "news"  # for messages that must not wait behind output

# ---- the forkserver

SOCKET_FOLDER_VARIABLE = "NBDDP_SOCKETS"  # environment variable with the path of the socket folder
STDERR_VARIABLE = "NBDDP_STDERR"  # the descriptor of the kernel's standard error
CUDA_USED = "cuda-used"  # file in that folder: processes forked from the forkserver cannot use CUDA
PRELOAD_SIGNAL = signal.SIGUSR1  # preload one more part while no rank is starting
PRELOADED_LATER = ("sympy", "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
PRELOAD_PARTS = 1 + len(PRELOADED_LATER)  # the first part is a warm shell

# ---- ranks and scripts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """Everything that a rank needs to start; sent over the pipe of the process that starts it.

    Attributes:
        topology: the rank's position in the world.
        spec: the options of the group, with the number of threads of this rank.
        store_port: port of the message store on this machine.
        store_prefix: prefix of all keys of this worker group in the store; empty for the group that
            serves the store.
        attempt: number of the group's start, from 1.
        run_attempt: number of the start in its run, from 1.
        incarnation: number of the rank's process in this attempt, from 0. Each heal adds 1.
        secret: key that signs messages.
        log_path: file that receives standard output and standard error.
        kernel_pid: the rank ends with this process.
        env: the whole environment.
        sys_path: the whole import path.
        cwd: working directory.
        run_id: name of the run.
        colors: IPython's color theme, for tracebacks and the debugger.
        can_rejoin: whether another notebook can take over the rank after this one has gone, so that
            the rank waits for it.
        interface: network interface for connections between ranks. If empty, the loopback is used
            when all ranks are on this machine, else the backend chooses.
    """

    topology: Topology
    spec: GroupSpec = field(repr=False)  # its variables may be secret
    store_port: int
    attempt: int
    secret: bytes = field(repr=False)
    log_path: str
    kernel_pid: int
    env: dict[str, str] = field(repr=False)
    sys_path: list[str]
    cwd: str
    run_id: str = "nbddp"
    run_attempt: int = 1
    colors: str = ""
    incarnation: int = 0
    interface: str = ""
    can_rejoin: bool = False
    store_prefix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A program as ``torchrun`` takes it: a file or, with ``-m``, a module.

    Attributes:
        name: as the user wrote it: ``train.py``, ``package.train``.
        path: absolute path of the file; empty for a module, which each rank finds itself.
        arguments: command-line arguments of the script.
        folder: first entry of ``sys.path``: the folder of the file, or the working directory for a
            module.
        keeps_names: whether the script's variables stay in the namespace of the cells.
    """

    name: str
    path: str
    arguments: list[str]
    folder: str
    keeps_names: bool = False


def command_queue(attempt: int, rank: int, incarnation: int = 0) -> str:
    """Return the name of the queue that a rank's main thread reads."""
    return f"a{attempt}.{incarnation}/command/{rank}"


def last_step_key(attempt: int, cell: int, name: object) -> str:
    """Return the key of a rank for its next step in an interrupted cell.

    The key "end" ends the wait of all ranks for the last step; its value is the reason. A rank that
    has ended after the last step sets the key "done".
    """
    return f"a{attempt}/last_step/{cell}/{name}"


def control_queue(attempt: int, rank: int, incarnation: int = 0) -> str:
    """Return the name of the queue that a rank's control thread reads while a cell runs."""
    return f"a{attempt}.{incarnation}/control/{rank}"
