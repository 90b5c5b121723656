"""The store that ranks meet in, opened again when the connection to it was ended."""

from __future__ import annotations

import torch.distributed as dist

from nbddp.wire.loopback import clone
from nbddp.worker.connections import Connections


class MeetingStore:
    """Has a client of the store whose waits an interrupt can end.

    Args:
        store: the first client, which the rank began with.
        connections: notes what is opened here as what a process group waits on.
    """

    def __init__(self, store: dist.Store, connections: Connections) -> None:
        self._store = store
        self._connections = connections
        self._is_lost = False

    def lose(self) -> None:
        """Its connection was shut down, or its server is another one; from any thread."""
        self._is_lost = True

    def open(self) -> dist.Store:
        """The client, or another one if that was lost."""
        if self._is_lost:
            self._is_lost = False  # before: the new one may be lost while it is opened
            try:
                self._store = self.one_more()
            except BaseException:
                self._is_lost = True
                raise
        return self._store

    def one_more(self) -> dist.Store:
        """A client besides, such as for a group of the user's: the wait on it is its own."""
        with self._connections.noting():
            return clone(self._store)
