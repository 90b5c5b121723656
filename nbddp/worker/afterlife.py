"""Delay freeing destroyed process groups while freeing them could deadlock.

A Gloo thread releases a tensor shortly after its collective has completed, and needs the GIL for
that. Freeing the group joins this thread. If Python holds the last reference, torch releases the
GIL during the join (300 rounds of ``new_group``, an asynchronous ``all_reduce`` and
``destroy_process_group`` in one process: no deadlock with torch 2.13). The reducer of a DDP model
does not release it: a model that goes out of scope just after ``destroy_process_group()``
deadlocks.

So the Python object of a destroyed group is kept while a DDP model uses the group. It is freed with
the next group that is destroyed, or two cells later, when its threads have nothing left to do. A
group that had no collective yet is kept too: a peer may still be connecting to this rank.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from nbddp.worker.flight_recorder import count_begun

CELLS = 2  # that a group outlives its end


class Afterlife:
    """Holds every process group of this rank until nothing of it is in use.

    Args:
        close: closes what the groups have open: a peer that waits for this rank hears of it, and
            so does a thread of ours. Before the first collective a peer may still be connecting.
        models: the DDP models of this process.
    """

    def __init__(self, close: Callable[[], None], models: Iterable[Any]) -> None:
        self._close = close
        self._models = models
        self._pid = os.getpid()
        self._groups: list[Any] = []
        self._ended: deque[list[Any]] = deque(([] for _ in range(CELLS)), maxlen=CELLS)

    def hold(self, group: dist.ProcessGroup) -> None:
        """Hold a group that was made."""
        self._groups.append(group)

    def begin(self) -> None:
        """Free groups when a cell destroys them; close their sockets once all are destroyed."""
        module: Any = dist.distributed_c10d
        destroy = module.destroy_process_group

        @functools.wraps(destroy)
        def destroy_and_free(group: dist.ProcessGroup | None = None) -> None:
            # a group of this rank alone does not show that peers of an earlier one have connected
            is_shared = dist.is_initialized() and dist.get_world_size() > 1
            has_met = is_shared and _has_met(module._get_default_group())
            destroy(group)
            if os.getpid() != self._pid:
                return
            if has_met and not dist.is_initialized():
                self._close()
            self._free()

        self.destroy = destroy
        module.destroy_process_group = dist.destroy_process_group = destroy_and_free

    def _free(self) -> None:
        """Free the destroyed groups that had a collective and that no DDP model uses."""
        in_use = [each.__dict__.get("process_group") for each in self._models]
        living = dist.distributed_c10d._world.pg_map
        self._groups = [
            each for each in self._groups if each in living or each in in_use or not _has_met(each)
        ]

    def begin_cell(self) -> None:
        """Free what ended some cells ago."""
        living = dist.distributed_c10d._world.pg_map
        self._ended.append([each for each in self._groups if each not in living])
        self._groups = [each for each in self._groups if each in living]


def _has_met(group: Any) -> bool:
    """Return whether a group has started a collective, so that all its ranks are connected."""
    return bool(group.size() == 1 or count_begun(group) > 0)
