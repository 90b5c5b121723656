"""The clients of the store that a rank has: one for each thread that may wait on it.

The notebook of a rank on a node may go and come back. The node's keeper keeps its port open
meanwhile, where nobody answers, so a client that connects again waits until there is a store. What
was said before is lost with the old store. The rank's queues keep their names and their secret,
which the next notebook gets from the keeper.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from nbddp.wire.loopback import clone, names_from_files
from nbddp.worker.connections import Connections

FOREVER = timedelta(days=365)


class StoreClient:
    """A client of the store that can connect again. Its connection is never shut down.

    Args:
        store: the first connection.
        connections: those of the rank.
    """

    def __init__(self, store: dist.Store, connections: Connections) -> None:
        self._store = store
        self._connections = connections

    def reconnect(self) -> dist.Store:
        """Connect to a server that has replaced the one before; wait until there is one."""
        with self._connections.keeping():
            self._store = clone(self._store)
        return self._store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@dataclass(frozen=True, slots=True)
class StoreClients:
    """All clients of a rank.

    Attributes:
        commands: what the main thread waits on between cells.
        control: what the control thread waits on.
        reports: for what the rank sends.
        parcels: what values travel through.
        groups: for process groups: the wait on it can be ended.
        connections: of this process.
    """

    commands: Any  # a StoreClient has all methods of a store
    control: Any
    reports: dist.Store
    parcels: Any
    groups: dist.Store
    connections: Connections

    @classmethod
    def connect(cls, port: int, prefix: str = "") -> StoreClients:
        """Connect them all, before any code of the user runs.

        Args:
            port: of the store, on this machine.
            prefix: what all keys begin with.
        """
        connections = Connections()
        with names_from_files():
            with connections.keeping():
                first: dist.Store = dist.TCPStore(
                    "127.0.0.1", port, is_master=False, timeout=FOREVER, wait_for_workers=False
                )
                if prefix:
                    first = dist.PrefixStore(prefix, first)
                reports, *others = (clone(first) for _ in range(3))
            with connections.noting():
                groups = clone(first)
        commands, control, parcels = (StoreClient(each, connections) for each in (first, *others))
        return cls(commands, control, reports, parcels, groups, connections)
