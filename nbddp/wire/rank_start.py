"""What ranks and the forkserver are started with, and the names of a rank's queues.

Imports no torch: the kernel imports this while torch is still being imported in the background.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from nbddp.topology import Topology

DEFAULT_TIMEOUT = 1800.0  # seconds for a collective: torch's own
RANKS_QUEUE = "up"  # the one queue that all ranks report into
URGENT_QUEUE = "news"  # and the one for what does not wait behind output

# ---- the forkserver

SOCKET_FOLDER_VARIABLE = "NBDDP_SOCKETS"  # environment variable
CUDA_USED = "cuda-used"  # a file in that folder: what is forked from the helper cannot use CUDA
PRELOAD_SIGNAL = signal.SIGUSR1  # one more part, now that nobody waits for a start
PRELOADED_LATER = ("sympy", "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
PRELOAD_PARTS = 1 + len(PRELOADED_LATER)  # the first is a warm shell

# ---- ranks and scripts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """All that a rank must be told; travels over the pipe of the process that starts it.

    Attributes:
        topology: its place in the world.
        store_port: the port of the store that messages go through, on this machine.
        store_prefix: what the keys of this worker group begin with there; empty for the group that
            serves the store.
        attempt: which start of the group this is, from 1.
        incarnation: which process of this rank in it, from 0: one that heals it is the next.
        secret: what messages are signed with.
        log_path: the file that becomes its standard output and error.
        kernel_pid: the process that it must not outlive.
        env: the environment, whole.
        sys_path: the import path, whole.
        cwd: the folder to work in.
        backend: ``auto``, ``gloo`` or ``nccl``.
        timeout: seconds after which a collective gives up.
        threads: threads for torch's operators.
        joins_group: whether to form a process group at the start.
        run_id: name of the run.
        colors: IPython's color theme, for tracebacks and the debugger.
        can_rejoin: whether the notebook, once it is gone, may come back, so that the rank waits.
        interface: of the network, through which it meets the others; empty for the loopback where
            all are on this machine, else for the one that the backend chooses.
    """

    topology: Topology
    store_port: int
    attempt: int
    secret: bytes = field(repr=False)
    log_path: str
    kernel_pid: int
    env: dict[str, str] = field(repr=False)
    sys_path: list[str]
    cwd: str
    backend: str = "auto"
    timeout: float = DEFAULT_TIMEOUT
    threads: int = 1
    joins_group: bool = True
    run_id: str = "nbddp"
    colors: str = ""
    incarnation: int = 0
    interface: str = ""
    can_rejoin: bool = False
    store_prefix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A program as ``torchrun`` takes it: a file, or with ``-m`` a module.

    Attributes:
        name: as it was written: ``train.py``, ``package.train``.
        path: the file, absolute; empty for a module, which each rank finds for itself.
        arguments: what stands behind it.
        folder: what stands first on ``sys.path``: the file's, or for a module the working folder.
        keeps: whether its names stay in the namespace of the cells.
    """

    name: str
    path: str
    arguments: list[str]
    folder: str
    keeps_names: bool = False


def command_queue(attempt: int, rank: int, incarnation: int = 0) -> str:
    """The queue of a rank's main thread."""
    return f"a{attempt}.{incarnation}/command/{rank}"


def control_queue(attempt: int, rank: int, incarnation: int = 0) -> str:
    """The queue of a rank's control thread, which answers while a cell runs."""
    return f"a{attempt}.{incarnation}/control/{rank}"
