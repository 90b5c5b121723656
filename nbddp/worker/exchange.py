"""What ranks tell each other over their process group, as JSON and as bytes of tensors.

Gloo's connections have no authentication, so nothing that comes over them is unpickled here.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def exchange(value: Any, device: torch.device) -> list[Any]:
    """Every rank's JSON value, on every rank, in order of rank.

    Args:
        value: what this rank says.
        device: where the backend can send from.
    """
    world_size = dist.get_world_size()
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=device))
    longest = max(int(size) for size in sizes)
    mine = torch.zeros(longest, dtype=torch.uint8, device=device)
    mine[: data.numel()] = data.to(device)
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine)
    return [
        json.loads(bytes(each[: int(size)].tolist()))
        for each, size in zip(everyone, sizes, strict=True)
    ]


def take_from_main(tensor: torch.Tensor, device: torch.device) -> None:
    """Fill a tensor with what rank 0 has in its own, of whatever type and layout."""
    if not tensor.numel():
        return
    sent = tensor.detach().to(device).contiguous()  # a step count may live on the CPU
    dist.broadcast(sent.reshape(-1).view(torch.uint8), src=0)
    with torch.no_grad():
        tensor.copy_(sent)
