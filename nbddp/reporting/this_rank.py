"""This rank: its number, world size, device, random seeds and warnings.

The functions work in a worker group, under torchrun and in a single process.
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

from nbddp import accelerator

_PACKAGE = str(Path(__file__).parents[1])


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks; 1 without a process group, -1 if this rank is not in it."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def device() -> torch.device:
    """Return the GPU of this rank, or the CPU if there is no GPU.

    ``LOCAL_RANK`` selects the GPU. Ranks share GPUs if there are fewer GPUs than ranks.
    """
    gpus = accelerator.device_count()
    if not gpus:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % gpus
    return torch.device(accelerator.current().device_type, index)


def communication_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device of the tensors that the process group can send; NCCL needs a GPU."""
    if dist.is_initialized() and accelerator.is_device_backend(dist.get_backend(group)):
        return device()
    return torch.device("cpu")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch, ``random`` and NumPy inside the body, and restore their states afterwards."""
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
    """Return a seed that depends on all of these numbers."""
    digest = blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch takes 63 bits


def warn_user(text: str) -> None:
    """Issue a warning that points at the innermost line outside of nbddp."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
