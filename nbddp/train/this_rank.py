"""This rank: which one it is, of how many, its device, its random numbers and its warnings.

It is the same in a worker group, under torchrun and alone.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

_KIT = str(Path(__file__).parent)


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


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers that depend on the seed alone; the training's own go on as if nothing was."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def mix(*numbers: int) -> int:
    """One seed out of several numbers, another for others."""
    digest = blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch takes 63 bits


def warn_user(text: str) -> None:
    """Warn, at the innermost line outside of the kit."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_KIT):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
