"""Process groups that were destroyed stay a while, for torch can stand still when one is freed.

A thread of Gloo lets go of a tensor shortly after its collective is over, and needs Python's lock
for it. Whoever frees the group in that moment waits for this thread, and holds the lock: a DDP
model that goes out of scope just after ``destroy_process_group()`` does (seen with torch 2.13). So
a group is freed two cells later, when its threads have nothing left to do.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

CELLS = 2  # that a group outlives its end


class Afterlife:
    """Holds every process group of this rank until nothing of it is in use.

    Args:
        close: closes what the groups have open: a peer that waits for this rank hears of it, and
            so does a thread of ours. Before the first collective a peer may still be connecting.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._pid = os.getpid()
        self._groups: list[Any] = []
        self._ended: deque[list[Any]] = deque(([] for _ in range(CELLS)), maxlen=CELLS)

    def hold(self, group: dist.ProcessGroup) -> None:
        """Hold a group that was made."""
        self._groups.append(group)

    def begin(self) -> None:
        """Close what the groups have open as soon as all of them are destroyed."""
        module: Any = dist.distributed_c10d
        destroy = module.destroy_process_group

        @functools.wraps(destroy)
        def destroy_and_close(group: dist.ProcessGroup | None = None) -> None:
            has_met = _has_met()
            destroy(group)
            if has_met and not dist.is_initialized() and os.getpid() == self._pid:
                self._close()

        module.destroy_process_group = dist.destroy_process_group = destroy_and_close

    def begin_cell(self) -> None:
        """Free what ended some cells ago."""
        living = dist.distributed_c10d._world.pg_map
        self._ended.append([each for each in self._groups if each not in living])
        self._groups = [each for each in self._groups if each in living]


def _has_met() -> bool:
    """Whether the default group has begun a collective, for which every rank had to be there."""
    if not dist.is_initialized():
        return False
    group: Any = dist.distributed_c10d._get_default_group()
    return int(group._get_sequence_number_for_group()) > 0
