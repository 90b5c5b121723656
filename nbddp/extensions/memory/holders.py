"""Count the bytes that models, optimizers, variables and the last error hold on a rank."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from nbddp.extensions.memory.messages import GPU, OTHER, PROCESS
from nbddp.extensions.memory.reachable import Reachable, is_visible
from nbddp.reporting.training_objects import checkpoints
from nbddp.worker.heal.shard_copies import Copy
from nbddp.worker.process_group.bound_objects import instances
from nbddp.worker.watch.namespace import paths_of

TENSORS, GRAPH, OUTPUT = "tensors", "autograd graph", "output"
ERROR, COPIES = "last error", "copies of nbddp"
_OF_IPYTHON = re.compile(r"_(_*|i*\d*)")  # variables such as _, __, _12 and _i12


class Holder(NamedTuple):
    """Who holds memory: ``place`` is the process or the GPU."""

    place: str
    name: str
    kind: str


class Storage(NamedTuple):
    """The memory of a tensor or an array; its views have the same one."""

    place: str
    address: int
    size: int
    is_shared: bool = False


class Holders:
    """Counts each storage once, for its first holder."""

    def __init__(self) -> None:
        self.bytes: Counter[Holder] = Counter()
        self.shared: list[Storage] = []  # in memory that other processes may have, too
        self._storages: set[tuple[str, int]] = set()
        self._modules: set[int] = set()

    def add(self, name: str, kind: str, value: Any) -> None:
        """Count the storages of a tensor or an array."""
        for storage in storages(value):
            if (storage.place, storage.address) not in self._storages:
                self._storages.add((storage.place, storage.address))
                self.bytes[Holder(storage.place, name, kind)] += storage.size
                self.shared += [storage] if storage.is_shared else []

    def add_all(
        self, found: Iterable[tuple[str, Any]], kind: str, paths: Mapping[int, str]
    ) -> None:
        """Count objects with the names of their holders: models first, then optimizers."""
        objects = [*found]
        modules = [each for each in objects if isinstance(each[1], nn.Module)]
        for name, module in modules:
            self._add_module(paths.get(id(module), name), module)
        for name, value in objects:
            if isinstance(value, Optimizer):
                for part in Reachable({}).of(value.state):
                    self.add(paths.get(id(value), name), "optimizer state", part)
        for name, value in objects:
            self.add(name, kind, value)
            if isinstance(value, torch.Tensor) and value.is_leaf:
                self.add(name, kind, value.grad)
        for name, value in objects:
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                for saved in saved_tensors(value.grad_fn):
                    self.add(name, GRAPH, saved)

    def _add_module(self, name: str, module: nn.Module) -> None:
        if id(module) in self._modules or "_modules" not in vars(module):
            return  # it is part of a model, or its __init__ has not finished
        self._modules.update(map(id, module.modules()))
        for parameter in module.parameters():
            self.add(name, "parameters", parameter)
        for parameter in module.parameters():
            self.add(name, "gradients", parameter.grad if parameter.is_leaf else None)
        for buffer in module.buffers():
            self.add(name, "buffers", buffer)


def storages(value: Any) -> Iterator[Storage]:
    """Yield the storages of a tensor, of the local part of a DTensor, or of a NumPy array."""
    if is_lazy(value):
        return  # a parameter of a lazy module, before its first forward pass
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):  # it wraps other tensors
            for name in value.__tensor_flatten__()[0]:
                yield from storages(getattr(value, name))
            return
        with suppress(RuntimeError):  # a sparse tensor has no storage
            storage = value.untyped_storage()
            if storage.device.type == "meta":  # also that of a fake tensor
                return
            if address := storage.data_ptr():
                place = PROCESS if value.device.type == "cpu" else GPU
                is_shared = place == PROCESS and storage.is_shared()
                yield Storage(place, address, storage.nbytes(), is_shared)
    elif (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.ndarray):
        while isinstance(value.base, numpy.ndarray):
            value = value.base
        yield Storage(PROCESS, value.__array_interface__["data"][0], value.nbytes)


def saved_tensors(node: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a graph keeps for ``backward()``, without calling their hooks."""
    seen, nodes = {node}, [node]
    while nodes:
        node = nodes.pop()
        for name in dir(node):
            if name.startswith("_raw_saved"):
                saved = getattr(node, name)
                for part in saved if isinstance(saved, tuple | list) else [saved]:
                    if isinstance(tensor := getattr(part, "data", None), torch.Tensor):
                        yield tensor
        new = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= new
        nodes += new


def count_holders(shell: Any, error: BaseException | None) -> Holders:
    """Count what the variables of a shell, its outputs, an error and nbddp hold, in this order."""
    hidden, namespace = shell.user_ns_hidden, shell.user_ns
    names = {
        name: value
        for name, value in namespace.items()
        if not _OF_IPYTHON.fullmatch(name) and not (name in hidden and value is hidden[name])
    }
    outputs = hidden.get("Out", {})
    copies = [*checkpoints, *instances([Copy])]
    reachable, holders = Reachable(namespace, [*copies, outputs]), Holders()
    found = [(name, part) for name in sorted(names) for part in reachable.of(names[name])]
    objects = [part for _, part in found if isinstance(part, (nn.Module, Optimizer))]
    paths = paths_of(objects, names)
    holders.add_all(found, TENSORS, paths)
    for number, value in outputs.items():
        holders.add_all([(f"Out[{number}]", part) for part in reachable.of(value)], OUTPUT, paths)
    holders.add_all(_of_error(error, reachable), ERROR, paths)
    for copy in copies:
        name = "--shard-copies" if isinstance(copy, Copy) else "Checkpoint"
        holders.add_all([(name, part) for part in reachable.root(copy)], COPIES, paths)
    for tensor in instances([torch.Tensor]):
        holders.add("", OTHER, tensor)
    return holders


def _of_error(error: BaseException | None, reachable: Reachable) -> Iterator[tuple[str, Any]]:
    """Yield what an error and its causes hold, with the local variables of their frames."""
    while error is not None:
        for frame, _ in walk_tb(error.__traceback__):
            if is_visible(frame) and frame.f_locals is not frame.f_globals:
                for name, value in [*frame.f_locals.items()]:
                    for part in reachable.of(value):
                        yield f"{name} in {frame.f_code.co_name}()", part
        for part in reachable.root(error):
            yield type(error).__name__, part
        error = error.__cause__ or error.__context__
