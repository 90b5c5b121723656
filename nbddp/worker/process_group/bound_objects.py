"""Find the objects of this rank that depend on a process group, under any name.

Most code keeps its model in an object of its own, or behind ``torch.compile``. So DDP models,
optimizers and schedules are recorded when they are created. The references are weak, so that no
object lives longer because of them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nbddp.reporting import state_providers
from nbddp.reporting.training_objects import WeakList
from nbddp.sharding import fsdp_classes
from nbddp.worker.watch.namespace import walk
from nbddp.worker.wrapping import wrap


class BoundObjects:
    """All DDP models, optimizers, learning-rate schedules and gradient scalers of this process."""

    def __init__(self) -> None:
        self.models = WeakList()
        self._optimizers = WeakList()
        self.schedules = WeakList()
        self.scalers = WeakList()
        self._kinds: list[tuple[type, WeakList]] = [
            (DistributedDataParallel, self.models),
            (Optimizer, self._optimizers),
            (LRScheduler, self.schedules),
            (ReduceLROnPlateau, self.schedules),  # it does not call LRScheduler.__init__
            (torch.amp.GradScaler, self.scalers),
        ]
        # for objects created, unpickled or copied later
        for kind, weak_list in self._kinds:
            _add_after(kind, "__init__", weak_list)
            if hasattr(kind, "__setstate__"):
                _add_after(kind, "__setstate__", weak_list)

    @property
    def optimizers(self) -> list[Any]:
        """All optimizers except wrappers, such as Lightning Fabric's.

        The wrapped optimizer has all of the state.
        """
        return [each for each in self._optimizers if not _wraps(each)]

    def has_any_in(self, group: Any) -> bool:
        """Return whether a DDP model or a sharded optimizer uses a process group."""
        objects = [*self.models, *filter(is_sharded, self._optimizers)]
        return any(vars(each).get("process_group") is group for each in objects)

    def add_existing(self) -> None:
        """Add objects that were unpickled without their ``__init__`` or ``__setstate__``."""
        found = instances([kind for kind, _ in self._kinds])
        for kind, weak_list in self._kinds:
            for obj in found:
                if issubclass(type(obj), kind):
                    weak_list.add(obj)


def _wraps(optimizer: Optimizer) -> bool:
    inner = (each for each in vars(optimizer).values() if isinstance(each, Optimizer))
    return any(getattr(optimizer, "state", None) is each.state for each in inner)


def _add_after(kind: type, method: str, weak_list: WeakList) -> None:
    def call_and_add(original: Any, self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        weak_list.add(self)

    wrap(kind, method, call_and_add)


def instances(kinds: Iterable[type]) -> list[Any]:
    """Return all objects of these types and their subclasses, without running their code."""
    classes = [*kinds]
    if not classes:
        return []
    for kind in classes:  # the list grows during the loop
        classes += type.__subclasses__(kind)
    class_ids = {id(kind) for kind in classes}
    # every object refers to its type; a loop in Python is far slower
    referrers = gc.get_referrers(*classes)
    return [each for each in referrers if id(type(each)) in class_ids]


def training_loaders() -> list[Any]:
    """Return the ``nbddp.loader`` objects for training, in order of creation."""
    found = instances(state_providers.kinds("loaders"))
    return sorted((each for each in found if not each.is_evaluation), key=attrgetter("number"))


def accumulations(optimizers: Iterable[Optimizer]) -> list[Any]:
    """Return each ``nbddp.precision`` that is in the middle of a step of these optimizers."""
    found = instances(state_providers.kinds("accumulations"))
    return [each for each in found if any(each._optimizer is obj for obj in optimizers)]


def is_sharded(optimizer: Any) -> bool:
    """Return whether an optimizer shards its state, as ZeroRedundancyOptimizer does."""
    return "process_group" in vars(optimizer)


def sharded_modules() -> list[nn.Module]:
    """Return the outermost modules that FSDP, version 1 or 2, has sharded."""
    kinds = fsdp_classes()
    return _outermost(instances(kinds) if kinds else [])


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inner = {id(part) for each in modules for part in each.modules() if part is not each}
    return [each for each in modules if id(each) not in inner]


def is_stale_mesh(value: Any) -> bool:
    """Return whether an object is a DeviceMesh of destroyed groups.

    A mesh of one dimension over all ranks finds the new default group by the name of the old one.
    """
    module = sys.modules.get("torch.distributed.device_mesh")
    if module is None or not issubclass(type(value), module.DeviceMesh):
        return False
    try:
        value.get_all_groups()
    except Exception:  # noqa: BLE001 - torch has several errors for it
        return True
    return False


def is_stale_tensor(value: Any) -> bool:
    """Return whether an object is a DTensor on a mesh of destroyed groups."""
    tensors = sys.modules.get("torch.distributed.tensor")
    is_dtensor = tensors is not None and issubclass(type(value), tensors.DTensor)
    return is_dtensor and is_stale_mesh(value.device_mesh)


def stale_modules(namespace: Mapping[str, Any]) -> list[nn.Module]:
    """Return the user's outermost modules with parameters on a mesh of destroyed groups.

    Leave out those that FSDP has sharded.
    """
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None or not instances([tensors.DTensor]):
        return []
    of_fsdp = {id(part) for each in sharded_modules() for part in each.modules()}
    found = {}
    for _, _, _, value in walk(namespace):
        # a module without _modules has not finished its __init__
        if issubclass(type(value), nn.Module) and "_modules" in vars(value):
            is_of_fsdp = any(id(part) in of_fsdp for part in value.modules())
            if not is_of_fsdp and any(map(is_stale_tensor, value.parameters())):
                found[id(value)] = value
    return _outermost([*found.values()])
