"""The notebook of a rank on a node is gone, and may come back: its connections wait for that.

The node's keeper keeps its port open meanwhile, where nobody answers. So a client that connects
anew waits until the tunnel stands again. What was said before is lost with the store; the rank's
queues keep their names and their secret, which the next notebook gets from the keeper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbddp.wire.loopback import clone, names_from_files

if TYPE_CHECKING:
    from torch.distributed import Store

    from nbddp.worker.arrival import Clients
    from nbddp.worker.connections import Connections
    from nbddp.worker.output.outbox import Outbox
    from nbddp.worker.process_group import ProcessGroup


class Lasting:
    """A client of the store that can be put in the place of itself.

    Args:
        store: the first one.
        connections: of the rank: that of a client like this is never shut down.
    """

    def __init__(self, store: Store, connections: Connections) -> None:
        self.store = store
        self._connections = connections

    def renew(self) -> Store:
        """Another client, as the server is gone; waits for a server for as long as it takes."""
        with names_from_files(), self._connections.keeping():
            self.store = clone(self.store)
        return self.store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


class Returning:
    """What a rank does when its notebook has gone and another one is there.

    Args:
        clients: of the store.
        group: of the rank.
        outbox: of the rank.
        end_cell: ends a cell that runs, which nobody shows any more.
        say_ready: tells the other notebook that this rank is there.

    Attributes:
        commands: the client that the main thread waits on between cells.
        parcels: the one that values travel through.
    """

    def __init__(
        self,
        clients: Clients,
        group: ProcessGroup,
        outbox: Outbox,
        end_cell: Callable[[], None],
        say_ready: Callable[[], None],
    ) -> None:
        self.commands = Lasting(clients.commands, clients.connections)
        self.parcels = Lasting(clients.parcels, clients.connections)
        self._control = Lasting(clients.control, clients.connections)
        self._group = group
        self._outbox = outbox
        self._end_cell = end_cell
        self._say_ready = say_ready

    def between_cells(self) -> Store:
        """On the main thread, which is free."""
        store = self.commands.renew()
        self.parcels.renew()
        self._outbox.reconnect()
        self._group.lose_store()
        self._say_ready()
        return store

    def at_any_time(self) -> Store:
        """On the control thread."""
        store = self._control.renew()
        self._end_cell()
        return store
