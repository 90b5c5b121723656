"""The numbers of a rank, read from and written to torchrun's environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from nbddp.errors import ArgumentError
from nbddp.formatting import plural

# not "torchrun": it may not be in the PATH of a kernel that a kernelspec started
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
BUSY_LOAD = 3.0  # for each core; a start then takes several times as long

_NUMBERS = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "node_rank": "GROUP_RANK",
    "world_size": "WORLD_SIZE",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "master_port": "MASTER_PORT",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The rank numbers of one process, and the address of its store.

    Attributes:
        rank: index in the world, ``0 <= rank < world_size``.
        local_rank: index on this machine, ``0 <= local_rank < local_world_size``.
        node_rank: index of the machine.
        group_world_size: number of machines; 0 if all have as many ranks as this one.
        world_size: ranks in total.
        local_world_size: ranks on this machine.
        master_addr: host on which rank 0 may serve a store for the other ranks.
        master_port: the port of that store.

    Raises:
        ArgumentError: the numbers contradict each other.

    >>> place = Topology.local(4, master_port=29500)[3]
    >>> place.to_env()["LOCAL_RANK"]
    '3'
    >>> Topology.from_env(place.to_env()) == place
    True
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int = 0
    group_world_size: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ArgumentError(f"world_size must be at least 1, got {self.world_size}")
        if not 1 <= self.local_world_size <= self.world_size:
            raise ArgumentError(
                f"local_world_size must be between 1 and {self.world_size}, "
                f"got {self.local_world_size}"
            )
        for name, most in (
            ("rank", self.world_size - 1),
            ("local_rank", self.local_world_size - 1),
            ("master_port", 65535),
        ):
            value = getattr(self, name)
            if not 0 <= value <= most:
                raise ArgumentError(f"{name} must be between 0 and {most}, got {value}")

    @classmethod
    def local(cls, nproc: int, *, master_port: int = 0) -> list[Topology]:
        """Return the topology of each of ``nproc`` ranks on this machine, in order of rank.

        Args:
            nproc: the number of ranks.
            master_port: the port of the rendezvous; 0 if it is not known yet.

        >>> [place.rank for place in Topology.local(2)]
        [0, 1]
        """
        place = partial(cls, world_size=nproc, local_world_size=nproc, master_port=master_port)
        return [place(rank=rank, local_rank=rank) for rank in range(nproc)]

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Topology:
        """Read the variables that torchrun, or :meth:`to_env`, wrote into ``env``.

        Raises:
            ArgumentError: a variable is missing, or the numbers contradict each other.
        """
        try:
            numbers = {field: int(env[name]) for field, name in _NUMBERS.items()}
            master_addr = env["MASTER_ADDR"]
        except KeyError as missing:
            raise ArgumentError(
                f"environment variable {missing.args[0]} is not set; start the ranks with torchrun"
            ) from None
        return cls(**numbers, master_addr=master_addr)

    def to_env(self, *, attempt: int = 1, run_id: str = "nbddp") -> dict[str, str]:
        """Return the variables that torchrun would set for this rank; pasted code may use them.

        ``TORCHELASTIC_USE_AGENT_STORE`` is left out. With it, no process would serve the address
        that a script names for its own processes, and they would wait for half an hour.

        Args:
            attempt: 1 for the first start, 2 for the first restart, as in
                ``TORCHELASTIC_RESTART_COUNT`` + 1.
            run_id: ``TORCHELASTIC_RUN_ID``.

        >>> place = Topology.from_env({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2",
        ...     "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        ...     "MASTER_PORT": "29500"})
        >>> place.to_env(attempt=2)["TORCHELASTIC_RESTART_COUNT"]
        '1'
        """
        machines = self.group_world_size or max(1, self.world_size // self.local_world_size)
        numbers = {name: str(getattr(self, field)) for field, name in _NUMBERS.items()}
        return numbers | {
            "MASTER_ADDR": self.master_addr,
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "GROUP_WORLD_SIZE": str(machines),
            "TORCHELASTIC_RESTART_COUNT": str(attempt - 1),
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": run_id,
        }


def cores_here() -> int:
    """Return the number of cores that this process may use; a container or Slurm may limit it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_overload() -> str:
    """Return the load of this machine if it is far above the number of its cores; else ""."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1  # the load is that of all cores
    is_busy = load > BUSY_LOAD * cores
    return f"this machine is busy: load {load:.0f} on {plural(cores, 'core')}" if is_busy else ""
