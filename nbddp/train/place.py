"""Which rank this is, of how many, and on what it computes; the same under torchrun and alone."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def rank() -> int:
    """This process's rank; 0 when there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """How many ranks there are; 1 when there is no process group, -1 when this is not in it."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def device() -> torch.device:
    """The GPU of this rank (``LOCAL_RANK``, shared when there are fewer than ranks), or the CPU."""
    gpus = torch.cuda.device_count()
    if not gpus:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
