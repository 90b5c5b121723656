"""What ranks tell each other over their process group, as JSON and as bytes of tensors.

Gloo's connections have no authentication, so nothing that comes over them is unpickled here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

LARGE = 1 << 20  # bytes of a tensor that is looked at before it is sent
_ROWS = 64


def exchange(value: Any, device: torch.device) -> list[Any]:
    """Every rank's JSON value, on every rank, in order of rank.

    By way of rank 0. An all_gather goes around a ring, and each of its steps waits for the one
    before: with 64 ranks on two cores it takes half a second, and this a tenth of that.

    Args:
        value: what this rank says.
        device: where the backend can send from.
    """
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.cat(_gathered(torch.tensor([data.numel()], device=device)))
    dist.broadcast(sizes, src=0)
    mine = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=device)
    mine[: data.numel()] = data.to(device)
    parts = [part[:size] for part, size in zip(_gathered(mine), sizes.tolist(), strict=True)]
    everyone = torch.cat(parts)
    dist.broadcast(everyone, src=0)
    return [json.loads(bytes(each.tolist())) for each in everyone.cpu().split(sizes.tolist())]


def _gathered(mine: torch.Tensor) -> list[torch.Tensor]:
    """What every rank has, on rank 0; elsewhere only room for as much."""
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.gather(mine, everyone if dist.get_rank() == 0 else None, dst=0)
    return everyone


def take_over(tensor: torch.Tensor, device: torch.device, source: int) -> None:
    """Fill a tensor with what one rank has in its own, of whatever type and layout."""
    if not tensor.numel():
        return
    sent = tensor.detach().to(device).contiguous()  # a step count may live on the CPU
    dist.broadcast(sent.reshape(-1).view(torch.uint8), src=source)
    with torch.no_grad():
        tensor.copy_(sent)


def equal_on_all(tensors: Sequence[torch.Tensor], device: torch.device, source: int) -> list[bool]:
    """Of each tensor, whether it is a large one and all ranks have in it what one of them has.

    To look costs a tenth of what it costs to send: after a death most ranks are at the same step.
    """
    large = [index for index, each in enumerate(tensors) if _size(each) >= LARGE]
    equal = [False] * len(tensors)
    if not large:
        return equal
    mine = torch.stack([_fingerprint(tensors[index]).to(device) for index in large])
    told = mine.clone()
    dist.broadcast(told, src=source)
    differs = (told != mine).to(torch.int64)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX)
    for index, differ in zip(large, differs.tolist(), strict=True):
        equal[index] = not differ
    return equal


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """64 bits that another value, or another order of the values, changes."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:  # no whole words can be seen there
        data = data.clone()
    whole = data.numel() // (8 * _ROWS) * (8 * _ROWS)
    sums = data[:whole].view(torch.int64).view(_ROWS, -1).sum(dim=1)
    odd = torch.arange(1, 2 * _ROWS, 2, device=data.device) * 0x9E3779B97F4A7C1
    rest = data[whole:].to(torch.int64)
    places = torch.arange(1, rest.numel() + 1, device=data.device)
    return (sums * odd).sum() + (rest * places).sum()
