"""The clients of the store that a rank has: one for each thread that may wait on it.

The notebook of a rank on a node may go and come back. The node's keeper keeps its port open
meanwhile, where nobody answers, so a client that connects again waits until there is a store. What
was said before is lost with the old store. The rank's queues keep their names and their secret,
which the next notebook gets from the keeper.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from nbddp.wire.loopback_store import clone, without_dns
from nbddp.worker.process_group.connections import Connections

FOREVER = timedelta(days=365)


class StoreClient:
    """A client of the store that can connect again.

    Args:
        store: the first connection.
        noting: within it a connection is opened, so that the rank knows what it is for.

    Attributes:
        store: the connection that is used now.
    """

    def __init__(
        self, store: dist.Store, recording: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.store = store
        self._recording = recording
        self._is_lost = False

    def open_connection(self) -> dist.Store:
        """Open another connection; wait until there is a server."""
        with self._recording():
            return clone(self.store)

    def reconnect(self) -> dist.Store:
        """Connect again, after the connection was shut down or the server was replaced."""
        self.store = self.open_connection()
        return self.store

    def invalidate(self) -> None:
        """The connection was shut down, or its server is another one; from any thread."""
        self._is_lost = True

    def ensure_connected(self) -> dist.Store:
        """Return the connection, or another one if it was lost."""
        if self._is_lost:
            self._is_lost = False  # before: the new one may be lost while it is opened
            try:
                self.reconnect()
            except BaseException:
                self._is_lost = True
                raise
        return self.store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@dataclass(frozen=True, slots=True)
class StoreClients:
    """All clients of a rank.

    Attributes:
        commands: what the main thread waits on between cells.
        control: what the control thread waits on.
        reports: for what the rank sends.
        payloads: what values travel through.
        groups: for process groups: an interrupt can end the wait on it.
        connections: of this process.
    """

    commands: Any  # a StoreClient has all methods of a store
    control: Any
    reports: dist.Store
    payloads: Any
    groups: StoreClient
    connections: Connections

    @classmethod
    def connect(cls, port: int, prefix: str = "") -> StoreClients:
        """Connect them all, before any code of the user runs.

        Args:
            port: of the store, on this machine.
            prefix: what all keys begin with.
        """
        connections = Connections()
        with without_dns(), connections.protecting():
            first: dist.Store = dist.TCPStore(
                "127.0.0.1", port, is_master=False, timeout=FOREVER, wait_for_workers=False
            )
            if prefix:
                first = dist.PrefixStore(prefix, first)
            reports, *others = (clone(first) for _ in range(3))
        commands, control, payloads = (
            StoreClient(each, connections.protecting) for each in (first, *others)
        )
        groups = StoreClient(first, connections.recording)
        groups.reconnect()
        return cls(commands, control, reports, payloads, groups, connections)
