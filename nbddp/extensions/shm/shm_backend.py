"""The backend ``shm``: which ranks can use it, and its groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from nbddp.extension.backend import Backend, LastingGroup
from nbddp.extensions.shm.engine import Recorder
from nbddp.extensions.shm.group import ShmGroup
from nbddp.import_hooks import change_when_imported
from nbddp.topology import Topology


class ShmBackend(Backend):
    """Makes groups over shared memory."""

    name = "shm"

    def __init__(self) -> None:
        self._groups: WeakSet[ShmGroup] = WeakSet()
        self._recorder = Recorder()
        # a compiled DDP model calls the groups: Dynamo would compile their methods, and fail
        change_when_imported("torch._dynamo.trace_rules", lambda rules: rules.add(__package__))

    def refusal(self, topology: Topology) -> str:
        if sys.platform != "linux":
            return "needs Linux"
        if topology.local_world_size < topology.world_size:
            return "connects only ranks on one machine"
        return ""

    def create_group(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> ShmGroup:
        group = ShmGroup(rank, size, self._recorder)
        self._groups.add(group)  # first, so that an interrupt can end the connection
        group.connect(store, timeout)
        return group

    def groups(self) -> Iterator[LastingGroup]:
        yield from list(self._groups)

    def entries(self) -> list[dict[str, Any]]:
        return self._recorder.entries()
