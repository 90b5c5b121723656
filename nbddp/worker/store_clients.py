"""The store clients of a rank: one for each thread that may wait on the store.

The notebook of a rank on a node may end and start again. Meanwhile the node agent keeps its port
open without answering, so a client that reconnects waits until there is a store. Messages sent
before that are lost with the old store. The rank's queues keep their names and their secret, which
the node agent gives to the next notebook.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from nbddp.wire.dns import without_dns
from nbddp.wire.store_connections import connect, hide_torch_warnings

Opening = Callable[[], AbstractContextManager[None]]  # a context in which connections are opened


class StoreClient:
    """A store client that can reconnect.

    Args:
        store: the first connection.
        recording: context in which connections are opened, which records their purpose.

    Attributes:
        store: the current connection.
    """

    def __init__(self, store: dist.Store, recording: Opening) -> None:
        self.store = store
        self._recording = recording
        self._is_lost = False

    def open_connection(self) -> dist.Store:
        """Open another connection, and wait until there is a server."""
        with self._recording(), without_dns():
            return self.store.clone()  # type: ignore[attr-defined, no-any-return]

    def reconnect(self) -> dist.Store:
        """Replace the connection after it was shut down or the server was replaced."""
        self._is_lost = False  # set first: the new connection may be lost while it is opened
        try:
            self.store = self.open_connection()
        except BaseException:
            self._is_lost = True
            raise
        return self.store

    def invalidate(self) -> None:
        """Mark the connection as lost; may be called from any thread."""
        self._is_lost = True

    def ensure_connected(self) -> dist.Store:
        """Return the connection, or a new one if it was lost."""
        return self.reconnect() if self._is_lost else self.store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ensure_connected(), name)


@dataclass(frozen=True, slots=True)
class StoreClients:
    """All store clients of a rank.

    Attributes:
        commands: the main thread waits on it between cells.
        control: the control thread waits on it.
        reports: sends messages to the controller.
        payloads: sends and receives payloads.
        groups: for process groups. An interrupt can end a wait on it.
    """

    commands: Any  # a StoreClient has all methods of a store
    control: Any
    reports: dist.Store
    payloads: Any
    groups: StoreClient

    @classmethod
    def connect(
        cls, port: int, prefix: str, protecting: Opening, recording: Opening
    ) -> StoreClients:
        """Open all connections, before any code of the user runs.

        Args:
            port: port of the store on this machine.
            prefix: prefix of all keys.
            protecting: for connections that stay open when a wait is ended.
            recording: for those that process groups wait on.
        """
        show_warnings = hide_torch_warnings()  # the log does not capture stderr yet
        with protecting():
            opened = [connect(port) for _ in range(4)]
        stores = [dist.PrefixStore(prefix, each) if prefix else each for each in opened]
        reports, *others = stores
        protected = [StoreClient(each, protecting) for each in others]
        commands, control, payloads = protected
        groups = StoreClient(commands.store, recording)
        groups.reconnect()
        show_warnings()
        return cls(commands, control, reports, payloads, groups)
