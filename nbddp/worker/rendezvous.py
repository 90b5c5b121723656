"""Where ``init_process_group()`` of a cell meets, as torchrun has it.

A rank that asks for its own rank and world size meets the others in nbddp's store, unless a store
is served at the address that it asks for. No port and no file is needed, and a cell may be run
again. All others, such as processes that a cell started, meet where torch would have them meet.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlparse

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from nbddp.topology import Topology
from nbddp.worker.families import guarded

PATIENCE = 1.0  # seconds for a connection on this machine
TWICE = (
    "trying to initialize the default process group twice! The ranks have one already: leave this "
    "line out, or run the cell with --no-init"
)


@dataclass(frozen=True, slots=True)
class Asked:
    """Which place, of how many, at which address."""

    rank: int
    world_size: int
    address: str
    port: int

    @classmethod
    def read(cls, url: str) -> Asked | None:
        """As torch reads it; None where something is missing, which torch then says."""
        parts, env = urlparse(url), os.environ
        query = dict(parse_qsl(parts.query))
        is_env = parts.scheme == "env"
        try:
            return cls(
                rank=int(query["rank"] if "rank" in query or not is_env else env["RANK"]),
                world_size=int(
                    query["world_size"]
                    if "world_size" in query or not is_env
                    else env["WORLD_SIZE"]
                ),
                address=env["MASTER_ADDR"] if is_env else parts.hostname or "",
                port=int(env["MASTER_PORT"]) if is_env else parts.port or 0,
            )
        except (KeyError, ValueError):
            return None

    @property
    def is_here(self) -> bool:
        """Whether the address is this machine's."""
        names = ("localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname())
        return self.address in names

    @property
    def is_served(self) -> bool:
        """Whether somebody listens there already."""
        try:
            with socket.create_connection((self.address, self.port), timeout=PATIENCE):
                return True
        except OSError:
            return False


class Rendezvous:
    """Serves ``env://``, ``tcp://`` and ``file://`` in this rank and in what it forks.

    Args:
        topology: the rank's place.
        attempt: which start of the group this is.
        open_store: a client of our store for one more process group.
    """

    def __init__(
        self, topology: Topology, attempt: int, open_store: Callable[[], dist.Store]
    ) -> None:
        self._topology = topology
        self._attempt = attempt
        self._open_store = open_store
        self._pid = os.getpid()
        self._cell = "start"
        self._running = topology.world_size
        self._count: Counter[tuple[int, bool]] = Counter()
        self._group_of = self._pid
        self._inherited: list[object] = []

    @property
    def family(self) -> str:
        """Whose processes meet on a port that a script names."""
        return f"{self._topology.rank} {self._pid}"

    def begin_cell(self, cell: int, *, running: int) -> None:
        """From here on ranks meet under this cell's prefix; ``running`` of them run it."""
        self._cell = f"cell{cell}"
        self._running = running
        self._count.clear()

    def serve(self) -> None:
        """Take torch's place in this process."""
        # the package's attribute of this name is the function
        handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
        for scheme in ("env", "tcp"):
            handlers[scheme] = self._meet(guarded(handlers[scheme], lambda: self.family))
        # An interrupt cannot end the wait in a FileStore, and a file of an earlier run misleads the
        # next one: torch removes it only when the last rank has freed its process group.
        handlers["file"] = self._meet(handlers["file"])
        module: Any = dist.distributed_c10d
        dist.init_process_group = module.init_process_group = self._init(module.init_process_group)

    def _meet(self, elsewhere: Callable[..., Any]) -> Callable[..., Any]:
        def meet(
            url: str, timeout: timedelta = default_pg_timeout, **options: Any
        ) -> Iterator[tuple[dist.Store, int, int]]:
            asked = Asked.read(url)
            if asked is None or not self._is_ours(asked, url):
                yield from elsewhere(url, timeout=timeout, **options)
                return
            store = self._store_there(asked, timeout) or self._our_store(asked, timeout)
            yield store, asked.rank, asked.world_size
            raise RuntimeError("cannot meet a second time")

        return meet

    def _is_ours(self, asked: Asked, url: str) -> bool:
        """Whether only ranks can come, each at its own place or where we told them to meet."""
        if os.getpid() != self._pid or asked.world_size > self._running:
            return False
        mine = self._topology
        shown = (mine.master_addr, mine.master_port)
        if url.startswith("env:") and (asked.address, asked.port) == shown:
            return True
        is_own_place = (asked.rank, asked.world_size) == (mine.rank, mine.world_size)
        return is_own_place and (asked.is_here or url.startswith("file:"))

    def _store_there(self, asked: Asked, timeout: timedelta) -> dist.Store | None:
        """The store that somebody serves at the address, such as a notebook; None without one."""
        if asked.port == self._topology.master_port or not asked.is_served:
            return None
        return dist.TCPStore(asked.address, asked.port, asked.world_size, timeout=timeout)

    def _our_store(self, asked: Asked, timeout: timedelta) -> dist.Store:
        """Under a prefix that was never used, the same on all ranks that meet.

        What one rank does alone, as rank 0 of 1, does not count for the others.
        """
        kind = (asked.world_size, asked.world_size == 1)
        self._count[kind] += 1
        prefix = f"a{self._attempt}/env/{self._cell}/{asked.world_size}/{self._count[kind]}"
        if asked.world_size == 1:
            prefix += f"/{self._topology.rank}"
        store = self._open_store()
        store.set_timeout(timeout)
        return dist.PrefixStore(prefix, store)

    def _init(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init_process_group(*args: Any, **options: Any) -> None:
            __tracebackhide__ = True
            if dist.is_initialized() and self._group_of != os.getpid():
                self._forget_inherited()
            if dist.is_initialized():
                raise ValueError(TWICE)
            original(*args, **options)
            self._group_of = os.getpid()

        return init_process_group

    def _forget_inherited(self) -> None:
        """In a forked process: the parent's groups stay the parent's, and stay open.

        They are kept, for torch would wait for their threads, which were not forked.
        """
        module: Any = dist.distributed_c10d
        world = module._world
        self._inherited += [world.default_pg, dict(world.pg_map)]
        module._update_default_pg(None)
        for held in (
            world.pg_map,
            world.pg_names,
            world.pg_group_ranks,
            world.pg_backend_config,
            world.pg_to_tag,
            world.tags_to_pg,
            world.pg_coalesce_state,
        ):
            held.clear()
        module._unregister_all_process_groups()
        world.group_count = 0
