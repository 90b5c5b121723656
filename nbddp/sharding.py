"""Which models, optimizers and tensors are sharded over ranks. It imports no module of FSDP."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def has_dtensors(part: object) -> bool:
    """Return whether a model, an optimizer or a tensor is sharded over ranks, as by FSDP2.

    >>> has_dtensors(nn.Linear(1, 1))
    False
    """
    tensors = sys.modules.get("torch.distributed.tensor")  # without it there is no DTensor
    return tensors is not None and any(
        isinstance(parameter, tensors.DTensor) for parameter in parameters_of(part)
    )


def is_sharded_over_all_ranks(part: object) -> bool:
    """Return whether a model or an optimizer has a DTensor on a mesh of all ranks."""
    meshes = [getattr(each, "device_mesh", None) for each in parameters_of(part)]
    return any(mesh is not None and mesh.size() == dist.get_world_size() for mesh in meshes)


def fsdp_classes() -> tuple[type, ...]:
    """Return the classes of FSDP, versions 1 and 2, if it is imported; the import takes 1 s."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    names = ("FullyShardedDataParallel", "FSDPModule")
    return tuple(getattr(fsdp, name) for name in names if hasattr(fsdp, name))


def parameters_of(part: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters of a model or an optimizer, or the tensor itself."""
    kind = type(part)  # isinstance() may run user code
    if issubclass(kind, torch.Tensor):
        yield part
    elif issubclass(kind, nn.Module) and "_modules" in vars(part):  # else __init__ has not finished
        yield from part.parameters()
    elif issubclass(kind, torch.optim.Optimizer):
        for group in part.param_groups:
            yield from group["params"]
