"""Measured workarounds for Gloo: groups that form, and groups that end."""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from nbddp.worker.process_group.connections import listening
from nbddp.worker.watch.flight_recorder import count_started
from nbddp.worker.wrapping import wrap

CONNECT_TIMEOUT = 1.0  # seconds for a connection to this process
CELLS_KEPT = 2  # cells for which a destroyed group is kept


# ---- groups that form


class GlooUnblocker:
    """Ends Gloo's wait for a rank that should connect but has died.

    While a group forms, every two ranks connect. The rank with the greater address connects, and
    sends the number of the pair; for a dead peer it gives up after three tries. The other rank
    listens, and its wait ends only with its timeout, five times over (torch 2.13, gloo's
    ``Listener``). So a rank that must be freed connects to itself, with every number. Its pairs
    then get connections that end.
    """

    def __init__(self) -> None:
        # by forming group: addresses in use before it, and addresses already connected to
        self._handled: dict[object, list[Any]] = {}
        # numbers of the pairs that form, by address of a device that older groups use too
        self._pairs: dict[Any, range] = {}

    @contextmanager
    def forming(self, shared: Sequence[Any] = (), pairs: range = range(0)) -> Iterator[None]:
        """Treat addresses where this process starts to listen as those of a forming group.

        Args:
            shared: addresses of a device that older groups use too.
            pairs: numbers that this device gives its next pairs.
        """
        group = object()
        self._pairs.update(dict.fromkeys(shared, pairs))
        self._handled[group] = [each for each in listening() if each not in shared]
        try:
            yield
        finally:
            del self._handled[group]

    def connect_to_self(self, world_size: int) -> None:
        """Give every pair of a forming group a connection that ends at once.

        Args:
            world_size: number of pairs that a rank may have. A device of Gloo numbers them from 0,
                and uses a number for the rank itself, too (tried with torch 2.13 and 2.15).
        """
        for handled in list(self._handled.values()):
            for address in [each for each in listening() if each not in handled]:
                handled.append(address)
                for number in self._pairs.get(address, range(world_size)):
                    with (
                        suppress(OSError),
                        socket.create_connection(address[:2], CONNECT_TIMEOUT) as client,
                    ):
                        client.sendall(struct.pack("@n", number))  # a ssize_t of this machine


# ---- groups that end


class GroupReleaser:
    """Delays freeing destroyed process groups while freeing them could deadlock.

    A Gloo thread releases a tensor shortly after its collective has completed, and needs the GIL
    for that. Freeing the group joins this thread. If Python holds the last reference, torch
    releases the GIL during the join (300 rounds of ``new_group``, an asynchronous ``all_reduce``
    and ``destroy_process_group`` in one process: no deadlock with torch 2.13). The reducer of a DDP
    model does not release it: a model that goes out of scope just after ``destroy_process_group()``
    deadlocks.

    So the Python object of a destroyed group is kept while a DDP model uses the group. It is freed
    with the next group that is destroyed, or two cells later, when its threads have nothing left to
    do. A group that had no collective yet is kept too: a peer may still be connecting to this rank.

    Args:
        close: closes the connections of groups, which ends the waits of peers for this rank, and of
            threads of this rank. Before the first collective a peer may still be connecting.
        models: the DDP models of this process.
    """

    def __init__(self, close: Callable[[], None], models: Iterable[Any]) -> None:
        self._close = close
        self._models = models
        self._pid = os.getpid()
        self._groups: list[Any] = []
        self._ended: deque[list[Any]] = deque(([] for _ in range(CELLS_KEPT)), maxlen=CELLS_KEPT)
        # free groups when a cell destroys them; close their sockets once all are destroyed
        self.destroy = wrap(dist.distributed_c10d, "destroy_process_group", self._destroy_and_free)
        dist.destroy_process_group = dist.distributed_c10d.destroy_process_group

    def keep_alive(self, group: dist.ProcessGroup) -> None:
        """Keep a reference to a new group."""
        self._groups.append(group)

    def _destroy_and_free(
        self, destroy: Callable[..., None], group: dist.ProcessGroup | None = None
    ) -> None:
        # a group of one rank does not show that the peers of an earlier group have connected
        is_shared = dist.is_initialized() and dist.get_world_size() > 1
        had_collective = is_shared and _has_connected(dist.group.WORLD)
        destroy(group)
        if os.getpid() != self._pid:
            return
        if had_collective and not dist.is_initialized():
            self._close()
        self._free()

    def _free(self) -> None:
        """Free the destroyed groups that had a collective and that no DDP model uses."""
        in_use = [each.__dict__.get("process_group") for each in self._models]
        living = dist.distributed_c10d._world.pg_map
        self._groups = [
            group
            for group in self._groups
            if group in living or group in in_use or not _has_connected(group)
        ]

    def begin_cell(self) -> None:
        """Free the groups that were destroyed some cells ago."""
        living = dist.distributed_c10d._world.pg_map
        self._ended.append([each for each in self._groups if each not in living])
        self._groups = [each for each in self._groups if each in living]


def _has_connected(group: Any) -> bool:
    """Return whether a group has started a collective, so that all its ranks are connected."""
    return bool(group.size() == 1 or count_started(group) > 0)
