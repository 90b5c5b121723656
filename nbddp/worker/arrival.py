"""What a rank does before it listens: settle in its place, and connect to the others' store."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from nbddp.wire.loopback import clone, names_from_files
from nbddp.wire.start import RankStart
from nbddp.worker.connections import Connections
from nbddp.worker.nccl import let_live

FOREVER = timedelta(days=365)
RECORDED = 400  # collectives that torch's flight recorder keeps: 3 ms to read


def settle(start: RankStart) -> None:
    """Take over the kernel's environment, folder and import path as they were at the start."""
    os.environ.clear()
    os.environ.update(start.env)
    os.environ.update(start.topology.to_env(attempt=start.attempt, run_id=start.run_id))
    os.environ["OMP_NUM_THREADS"] = str(start.threads)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))
    if interface := start.interface or _loopback(start.topology.master_addr):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)  # else they listen on every interface
    let_live()
    dist.set_debug_level_from_env()  # torch has read TORCH_DISTRIBUTED_DEBUG before we were forked
    os.chdir(start.cwd)
    sys.path[:] = start.sys_path
    torch.set_num_threads(start.threads)


def _loopback(address: str) -> str:
    if address != "127.0.0.1":
        return ""
    return "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True, slots=True)
class Clients:
    """A client of the store for each thread that may wait on it."""

    commands: dist.Store
    control: dist.Store
    reports: dist.Store
    parcels: dist.Store
    groups: dist.Store
    connections: Connections

    @classmethod
    def connect(cls, port: int, prefix: str = "") -> Clients:
        """Connect them all, before any code of the user runs.

        Args:
            port: of the store, on this machine.
            prefix: what all keys begin with.
        """
        connections = Connections()
        with names_from_files():
            with connections.keeping():
                first: dist.Store = dist.TCPStore(
                    "127.0.0.1",
                    port,
                    is_master=False,
                    timeout=FOREVER,
                    wait_for_workers=False,
                )
                if prefix:
                    first = dist.PrefixStore(prefix, first)
                control, reports, parcels = (clone(first) for _ in range(3))
            with connections.noting():
                groups = clone(first)
        return cls(first, control, reports, parcels, groups, connections)
