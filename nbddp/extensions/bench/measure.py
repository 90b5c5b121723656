"""Time the collectives of the default process group; each rank calls :func:`measure`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from nbddp import accelerator
from nbddp.extensions.bench.speeds import MEMCPY, Speeds
from nbddp.reporting.this_rank import communication_device

WARM_UP = 2  # calls
ROUNDS = 5  # the time of a call is the median of so many rounds
SECONDS = 0.2  # for all rounds of a collective and a size
MAX_CALLS = 200  # in a round
ELEMENT = 4  # bytes of a float32


def measure(sizes: Sequence[int]) -> Speeds:
    """Measure each collective with each size, rounded up to equal parts for all ranks."""
    world_size = dist.get_world_size()
    unit = ELEMENT * world_size
    rounded = sorted({-(-size // unit) * unit for size in sizes})
    speeds = Speeds(dist.get_backend(), world_size, rounded)
    for size in rounded:
        for name, call in _calls(size).items():
            speeds.times.setdefault(name, []).append(_seconds(call))
    return speeds


def _calls(size: int) -> dict[str, Callable[[], object]]:
    """Return the collectives of tensors of a size, and a copy."""
    device, count = communication_device(), size // ELEMENT
    # zeros: their sums stay small. Filled: all pages of their memory are used
    whole, other = (torch.empty(count, device=device).fill_(0) for _ in range(2))
    part = whole[: count // dist.get_world_size()].clone()
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        MEMCPY: lambda: other.copy_(whole),
    }


def _seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call on the slowest rank; all ranks make equally many calls."""
    _round(call, WARM_UP)
    slowest = _slowest(_round(call, 1))
    count = min(MAX_CALLS, max(1, int(SECONDS / ROUNDS / slowest)))
    return _slowest(median(_round(call, count) for _ in range(ROUNDS)))


def _round(call: Callable[[], object], count: int) -> float:
    """Return the seconds of a call, on average of so many; all ranks begin at the same time."""
    dist.barrier()
    accelerator.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    accelerator.synchronize()
    return (time.perf_counter() - began) / count


def _slowest(seconds: float) -> float:
    found = torch.tensor([seconds], dtype=torch.float64, device=communication_device())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found.item())
