"""References to destroyed process groups that torch keeps."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from functools import cache
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

from nbddp import accelerator

logger = logging.getLogger(__name__)


def is_alive(group: Any) -> bool:
    """Return whether a process group exists and was not destroyed."""
    return group is not None and group in dist.distributed_c10d._world.pg_map


def was_default(group: Any) -> bool:
    """Return whether a process group is, or was, the default group."""
    return bool(group.group_desc == "default_pg" and group.size() == dist.get_world_size())


def renew_torch(namespace: Mapping[str, Any]) -> None:
    """Replace the destroyed default group in default arguments, and forget meshes on old groups.

    ``torch.distributed.nn`` has the group as a default argument, and so may functions of a cell.
    """
    functional = sys.modules.get("torch.distributed.nn.functional")
    values = [] if functional is None else [*vars(functional).values()]
    for value in [*values, *namespace.values()]:
        if type(value) is FunctionType and value.__defaults__:
            value.__defaults__ = tuple(map(_newest_default_group, value.__defaults__))
    if "torch.distributed.tensor" in sys.modules:
        with torch.enable_grad():
            kind = accelerator.current()
            device = kind.device_type if kind.module.is_initialized() else "cpu"
            one = torch.ones(1, device=device, requires_grad=True)
            _ClearMeshCaches.apply(one).backward()


def _newest_default_group(value: Any) -> Any:
    is_old = isinstance(value, dist.ProcessGroup) and not is_alive(value) and was_default(value)
    return dist.group.WORLD if is_old else value


class _ClearMeshCaches(torch.autograd.Function):
    """Clears the caches in which DTensor finds the old mesh for a new one, because they are equal.

    Each thread has its own caches, and backward passes on a GPU run in a thread of their own.
    """

    @staticmethod
    def forward(_context: Any, value: torch.Tensor) -> torch.Tensor:
        _clear_mesh_caches()
        return value.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        _clear_mesh_caches()
        return gradient


def _clear_mesh_caches() -> None:
    tensor: Any = sys.modules["torch.distributed.tensor"].DTensor
    cache_clear = "_op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear"
    functions = [(tensor, cache_clear)]
    if torch.__version__ >= "2.10":  # the first with a second cache, in C++
        functions.append((torch._C, "_clear_DTensor_sharding_propagator_cache"))
    for owner, path in functions:
        try:
            clear = attrgetter(path)(owner)
        except AttributeError as error:
            _warn_of_missing_cache(str(error))
        else:
            clear()


@cache
def _warn_of_missing_cache(error: str) -> None:  # once: the caches are cleared after each heal
    logger.warning(
        "DTensor on a new mesh may use a destroyed group, because torch %s has another "
        "cache (%s): if an operation fails, run %%ddp restart",
        torch.__version__,
        error,
    )
