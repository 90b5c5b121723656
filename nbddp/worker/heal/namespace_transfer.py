"""Pickle a rank's variables for a replacement, as far as they can be pickled.

One pickler pickles all variables in turn and remembers all objects. So shared objects stay shared:
an optimizer still refers to the parameters of the model. Code that runs during unpickling finds the
modules, functions and classes that it needs. A variable that cannot be pickled is omitted and
reported. If only a part of an object cannot be pickled, a placeholder replaces that part. The
pickle does not contain the memory of tensors: it is sent separately, and views share it.
"""

from __future__ import annotations

import copyreg
import functools
import io
import logging
import pickle
import subprocess
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from mmap import mmap
from multiprocessing.connection import Connection
from multiprocessing.managers import BaseManager, BaseProxy
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import ShareableList, SharedMemory
from operator import attrgetter
from types import BuiltinMethodType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import UntypedStorage, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, optimizer
from torch.storage import TypedStorage
from torch.utils.data import DataLoader

from nbddp.formatting import with_article
from nbddp.reporting.training_objects import prepared_models
from nbddp.wire.function_sources import Pickler
from nbddp.wire.request_messages import KEEPS_RANK, MADE_BY_ALL
from nbddp.worker.heal.hook_pickling import describe_global_hooks, reduce_with_hooks
from nbddp.worker.heal.placeholder import Placeholder
from nbddp.worker.heal.sharded_pickling import (
    describe_fsdp,
    newest_hook,
    number_hooks_from,
    reduce_sharded,
    shard_again,
    why_not_restored,
)
from nbddp.worker.process_group.migration import GROUP_ATTRIBUTES
from nbddp.worker.tracebacks import error_text
from nbddp.worker.watch.namespace import paths_of

_NAMESPACE_ID = "the namespace"
# The step() of a cell's optimizer refers to them. They hold the hooks of this process.
_STEP_HOOKS = {
    "hooks before steps": optimizer._global_optimizer_pre_hooks,
    "hooks after steps": optimizer._global_optimizer_post_hooks,
}
PROTOCOL = 5  # pickle protocol
MIN_ARRAY_BYTES = 4096  # bytes; the memory of larger arrays is sent like that of tensors
_LRU_CACHE = type(functools.lru_cache(print))
# Accelerate's wrapper of a forward() in mixed precision, which refuses to be pickled
_FP32_OUTPUTS = "accelerate.utils.operations.ConvertOutputsToFp32"
# A copy would act on the donor's child, shared memory or manager. A copy of a connection would use
# and close an unrelated file descriptor.
_OF_ONE_RANK = (
    *(subprocess.Popen, BaseProcess, psutil.Process, Connection),
    *(SharedMemory, ShareableList, BaseManager, BaseProxy),
)
_MAKES_TRAINERS = "`%ddp heal --rerun` makes it again, on all ranks"
# other people's trainers; a copy would act as the donor's rank
_TRAINERS = {
    "transformers.trainer.Trainer",
    "transformers.training_args.TrainingArguments",
    "lightning.fabric.fabric.Fabric",
    "lightning.pytorch.trainer.trainer.Trainer",
    "lightning_fabric.fabric.Fabric",
    "pytorch_lightning.trainer.trainer.Trainer",
}


@dataclass(frozen=True, slots=True)
class PickledNamespace:
    """Pickled variables for another rank.

    Attributes:
        data: the pickled variables.
        storages: memory of tensors and large arrays, each once.
        names: the variables in ``data``.
        not_carried: the reason for each of the other variables.
    """

    data: bytes
    storages: Sequence[UntypedStorage]
    names: tuple[str, ...]
    not_carried: Mapping[str, str]


class UnpickleError(Exception):
    """A variable could not be unpickled on the other rank.

    Attributes:
        name: name of the variable.
    """

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(_first_line(error))
        self.name = name


class _NamespacePickler(Pickler):
    """Pickles objects of a namespace for the same namespace in another process."""

    def __init__(
        self,
        file: Any,
        namespace: dict[str, Any],
        groups: Mapping[Any, str],
        restored: Container[int],
    ) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self.file = file
        self._namespace = namespace
        self._groups = groups
        self._restored = restored
        self.globals_ref[id(namespace)] = namespace  # cloudpickle's table of globals of functions
        self._indices: dict[int, int] = {}  # index of a storage, by its address in C++
        self.storages: list[UntypedStorage] = []
        self.missing: list[tuple[Any, str]] = []
        self.prepared: list[nn.Module] = []
        self.sharded: list[nn.Module] = []
        self._whole: Any = None
        self._may_lack_parts = False

    def add(self, value: Any, *, may_lack_parts: bool = False) -> None:
        """Pickle one more object. With ``may_lack_parts``, replace parts that cannot be pickled."""
        self._whole, self._may_lack_parts = value, may_lack_parts
        self.dump(value)

    def persistent_id(self, obj: Any) -> Any:
        """Pickle the namespace, living process groups and the memory of tensors by reference."""
        if obj is self._namespace:
            return _NAMESPACE_ID
        if isinstance(obj, dist.ProcessGroup) and obj in self._groups:
            return self._groups[obj]
        for name, hooks in _STEP_HOOKS.items():
            if obj is hooks:
                return name
        if isinstance(obj, TypedStorage):
            return self._storage_index(obj._untyped_storage), obj.dtype
        return (self._storage_index(obj), None) if isinstance(obj, UntypedStorage) else None

    def _storage_index(self, storage: UntypedStorage) -> int:
        index = self._indices.setdefault(storage._cdata, len(self.storages))
        if index == len(self.storages):
            self.storages.append(storage)
        return index

    def reducer_override(self, obj: Any) -> Any:
        """Pickle objects so that they work on the other rank.

        Functions use that rank's globals, and models have no process group.
        """
        if isinstance(obj, nn.Module) and obj in prepared_models:
            self.prepared.append(obj)
        if isinstance(obj, nn.Module) and hasattr(type(obj), "_get_fsdp_state"):
            self.sharded.append(obj)
        if isinstance(obj, FunctionType) and obj.__globals__ is self._namespace:
            make, arguments, (attributes, slots), *more = self._dynamic_function_reduce(obj)
            return make, arguments, (attributes, slots | {"__globals__": {}}), *more
        if isinstance(obj, _LRU_CACHE):  # it pickles itself by name only
            return _make_cached, (obj.__wrapped__, obj.cache_parameters())
        if reason := _why_not_movable(obj) or why_not_restored(obj, self._restored):
            return self._replace_part(obj, reason)
        reduced = reduce_with_hooks(obj) or reduce_sharded(obj)
        if reduced := reduced or _custom_reduce(obj, self._groups):
            return reduced
        if isinstance(obj, logging.Logger) and obj is logging.getLogger(obj.name):
            return _make_logger, (obj.name, obj.level, obj.propagate, obj.disabled)
        reduced = super().reducer_override(obj)
        is_by_name = isinstance(obj, (type, FunctionType))  # pickled by the name of its module
        if reduced is NotImplemented and self._may_lack_parts and not is_by_name:
            reason = _why_unpicklable(obj, self.dispatch_table)
            return self._replace_part(obj, reason) if reason else reduced
        return reduced

    def _replace_part(self, part: Any, reason: str) -> Any:
        if part is self._whole or not self._may_lack_parts:
            raise pickle.PicklingError(reason)
        self.missing.append((part, reason))
        return Placeholder, (_type_with_article(part),)


class _DeadReferent:
    """Stands for a deleted object; on the replacement it is deleted, too."""


class _NamespaceUnpickler(pickle.Unpickler):
    """Unpickles objects into a namespace."""

    def __init__(
        self,
        data: bytes,
        namespace: dict[str, Any],
        storages: Sequence[UntypedStorage],
        find_group: Callable[[str], Any],
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._namespace = namespace
        self._storages = storages
        self._find_group = find_group

    def persistent_load(self, pid: Any) -> Any:
        """Return this process's namespace or group, or memory that was allocated here."""
        if pid == _NAMESPACE_ID:
            return self._namespace
        if isinstance(pid, str):
            return _STEP_HOOKS[pid] if pid in _STEP_HOOKS else self._find_group(pid)
        index, dtype = pid
        storage = self._storages[index]
        if dtype is None:
            return storage
        return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def pickle_namespace(
    namespace: dict[str, Any],
    exclude: Iterable[str] = (),
    extra: Any = None,
    groups: Mapping[Any, str] = MappingProxyType({}),
    restored: Container[int] = (),
) -> PickledNamespace:
    """Pickle all variables of a namespace except some.

    Args:
        namespace: the globals of the cells' functions.
        exclude: variables that are the rank's own, or the shell's.
        extra: more values for :func:`load_namespace`.
        groups: the names of the process groups that the replacement has too.
        restored: the ids of the DTensors whose values the replacement gets later.

    >>> step = [3]
    >>> carried = pickle_namespace({"step": step, "same": step, "gate": (n for n in ())})
    >>> carried.names, carried.not_carried
    (('step', 'same'), {'gate': "cannot pickle 'generator' object"})
    >>> there = {}
    >>> load_namespace(carried.data, there, carried.storages)
    >>> there["step"] is there["same"]
    True
    """
    exclude = {*exclude}
    names = {name: value for name, value in namespace.items() if name not in exclude}
    new_pickler = partial(_NamespacePickler, namespace=namespace, groups=groups, restored=restored)
    not_carried = describe_global_hooks()
    broken: set[str] = set()
    pickler, reason = _pickle_names(new_pickler, names, extra)
    if reason:
        for name, value in names.items():
            if not _pickle_names(new_pickler, {name: value})[1]:
                continue
            parts, reason = _pickle_names(new_pickler, {name: value}, broken={name})
            not_carried |= (
                {name: reason} if reason else _describe_missing(name, value, parts.missing)
            )
            broken.add(name)
        trainers = {
            name: Placeholder(_type_with_article(names[name]), _MAKES_TRAINERS)
            for name, reason in not_carried.items()
            if reason == KEEPS_RANK and name in names
        }
        names = {name: value for name, value in names.items() if name not in not_carried}
        pickler, reason = _pickle_names(new_pickler, names | trainers, extra, broken)
        if reason:
            raise pickle.PicklingError(reason)
    return PickledNamespace(pickler.file.getvalue(), pickler.storages, tuple(names), not_carried)


def _describe_missing(name: str, whole: Any, missing: Sequence[tuple[Any, str]]) -> dict[str, str]:
    """Return the parts of an object that could not be pickled, with the reasons."""
    paths = paths_of([part for part, _ in missing], {name: whole})
    descriptions: dict[str, str] = {}
    for number, (part, reason) in enumerate(missing, start=1):
        what = paths.get(id(part), f"{_type_with_article(part)} in {name}")
        descriptions[f"{what} ({number})" if what in descriptions else what] = reason
    return descriptions


def load_namespace(
    data: bytes,
    namespace: dict[str, Any],
    storages: Sequence[UntypedStorage],
    on_extra: Callable[[Any], None] = lambda _: None,
    find_group: Callable[[str], Any] = lambda _: None,
) -> None:
    """Unpickle variables into this process's namespace.

    ``storages`` has memory of the same sizes as on the other rank; it may be filled later.
    ``on_extra`` is called with the ``extra`` values before the variables are unpickled.
    ``find_group`` returns this rank's group for the name of one of the donor's groups.

    Raises:
        UnpickleError: a variable could not be unpickled here. The namespace is unchanged.
    """
    unpickler = _NamespaceUnpickler(data, namespace, storages, find_group)
    names, extra = unpickler.load()
    on_extra(extra)
    before = dict(namespace)
    for name in names:
        try:
            namespace[name] = unpickler.load()
        except Exception as error:
            namespace.clear()
            namespace.update(before)
            raise UnpickleError(name, error) from error
    prepared, fsdp, hook = unpickler.load()
    for model in prepared:
        prepared_models.add(model)
    number_hooks_from(hook)
    shard_again(fsdp)
    if "__builtins__" in before:  # cloudpickle sets it to a dict for each function
        namespace["__builtins__"] = before["__builtins__"]


def _pickle_names(
    new_pickler: Callable[..., _NamespacePickler],
    names: Mapping[str, Any],
    extra: Any = None,
    broken: Container[str] = (),
) -> tuple[_NamespacePickler, str]:
    """Pickle variables; of those in ``broken``, only the parts that can be pickled.

    Return the pickler, and why it failed; "" if it succeeded.
    """
    pickler = new_pickler(io.BytesIO())
    # modules first, then classes and functions: other objects may need them while unpickling
    first = [each for each in names if issubclass(type(names[each]), ModuleType)]
    then = [each for each in names if issubclass(type(names[each]), (type, FunctionType))]
    order = [*dict.fromkeys((*first, *then, *names))]
    try:
        pickler.add((order, extra))
        for name in order:
            pickler.add(names[name], may_lack_parts=name in broken)
        pickler.add((pickler.prepared, describe_fsdp(pickler.sharded), newest_hook()))
    except Exception as error:  # noqa: BLE001 - an object's code may raise anything; it is reported
        return pickler, _first_line(error)
    return pickler, ""


def _why_not_movable(obj: Any) -> str:
    """Return why an object belongs to its process, or to all ranks together; else ""."""
    if isinstance(obj, io.IOBase) and not isinstance(obj, (io.BytesIO, io.StringIO)):
        return f"{_type_with_article(obj)} that is open belongs to its process"
    if _is_mapped(obj):
        return f"{_type_with_article(obj)} in a mapped file or shared memory belongs to its process"
    if isinstance(obj, _OF_ONE_RANK):
        return f"{_type_with_article(obj)} belongs to the rank that made it"
    if isinstance(obj, threading.Thread):
        return f"{_type_with_article(obj)} belongs to its process"
    if isinstance(obj, dist.ProcessGroup):
        return MADE_BY_ALL
    kinds = {f"{each.__module__}.{each.__qualname__}" for each in type(obj).__mro__}
    return KEEPS_RANK if kinds & _TRAINERS else ""


def _is_mapped(obj: Any) -> bool:
    """Return whether an array or a tensor is in a mapped file or in shared memory."""
    if type(obj) in (torch.Tensor, nn.Parameter):
        return obj.layout is torch.strided and obj.untyped_storage().filename is not None
    while isinstance(obj, np.ndarray | memoryview):
        obj = obj.base if isinstance(obj, np.ndarray) else obj.obj
    return isinstance(obj, mmap)


def _type_with_article(value: Any) -> str:
    return with_article(type(value).__name__.strip("_"))


def _first_line(error: BaseException) -> str:
    return _message_of(error).partition("\n")[0] or type(error).__name__


# ---- objects that cannot be carried


def _why_unpicklable(part: Any, reducers: Any) -> str:
    """Return why a part of an object cannot be pickled; empty if its class does not refuse."""
    if isinstance(part, BuiltinMethodType):
        owner = part.__self__
        return "" if isinstance(owner, (ModuleType, type)) else _why_unpicklable(owner, reducers)
    reduce = reducers.get(type(part))
    try:
        reduce(part) if reduce else part.__reduce_ex__(PROTOCOL)
    except Exception as error:  # noqa: BLE001 - an object's code may raise anything; it is reported
        return _message_of(error) or type(error).__name__
    return ""


def _message_of(error: BaseException) -> str:
    """Return the message of an exception, also if it is a format string with arguments.

    >>> _message_of(NotImplementedError("{} cannot be pickled", "_Iter"))
    '_Iter cannot be pickled'
    """
    words, *values = error.args or ("",)
    if values and isinstance(words, str) and words.count("{}") == len(values):
        return words.format(*values)
    return error_text(error)


def _make_cached(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**options)(function)


def _make_logger(name: str, level: int, propagate: bool, disabled: bool) -> logging.Logger:  # noqa: FBT001
    logger = logging.getLogger(name)
    logger.setLevel(level)
    logger.propagate, logger.disabled = propagate, disabled
    return logger


# ---- loaders and models


def _custom_reduce(obj: Any, groups: Container[Any]) -> Any:
    """Return how to pickle an object that pickle refuses or restores incompletely, else None."""
    if type(obj) is weakref.ReferenceType:
        target = obj()
        return weakref.ref, (_DeadReferent() if target is None else target,)
    if isinstance(obj, OpOverload | OpOverloadPacket):  # a copy calls its __getattr__ for ever
        return attrgetter(f"ops.{obj}"), (torch,)
    if shared := _shared_dict(obj):
        return _make_sharing, (type(obj), shared), vars(obj).copy()
    if f"{type(obj).__module__}.{type(obj).__qualname__}" == _FP32_OUTPUTS:
        return type(obj), (obj.model_forward,)
    if isinstance(obj, DistributedDataParallel):
        has_group = vars(obj).get("process_group") in groups
        dropped = GROUP_ATTRIBUTES[has_group:]
        state = {key: value for key, value in vars(obj).items() if key not in dropped}
        return _make_unbound, (type(obj), state)
    if isinstance(obj, Optimizer) and type(obj).__getstate__ is Optimizer.__getstate__:
        return copyreg.__newobj__, (type(obj),), _optimizer_state(obj)  # type: ignore[attr-defined]
    if isinstance(obj, DataLoader) and getattr(obj, "_iterator", None) is not None:
        match obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL):
            case (make, arguments, {"_iterator": _, **rest}, *more):  # torch starts new workers
                return make, arguments, {**rest, "_iterator": None}, *more
            case reduced:  # a class with its own pickling
                return reduced
    # other arrays stay in the pickle, which keeps their memory order and read-only flag
    is_large = type(obj) is np.ndarray and obj.nbytes >= MIN_ARRAY_BYTES
    if is_large and obj.flags.carray and not obj.dtype.hasobject:
        memory = torch.from_numpy(obj.reshape(-1).view(np.uint8))
        return _make_array, (memory, obj.dtype, obj.shape)
    return None


def _make_array(memory: torch.Tensor, dtype: Any, shape: tuple[int, ...]) -> Any:
    return memory.numpy().view(dtype).reshape(shape)


def _shared_dict(obj: Any) -> str:
    """Return the name of the class attribute that is the object's ``__dict__``; "" if none is.

    All objects of such a class share their attributes.
    """
    attributes = getattr(obj, "__dict__", None)
    if type(attributes) is not dict or isinstance(obj, type):
        return ""
    return next((name for name, value in vars(type(obj)).items() if value is attributes), "")


def _make_sharing(kind: Any, shared: str) -> Any:
    """Create an object whose ``__dict__`` is this attribute of its class."""
    made = kind.__new__(kind)
    made.__dict__ = getattr(kind, shared)
    return made


def _optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return what torch pickles, the hooks and all other attributes, as a wrapped optimizer."""
    dropped = {each for each in vars(Optimizer([torch.zeros(1)], {})) if "hooks" not in each}
    attributes = {key: value for key, value in vars(optimizer).items() if key not in dropped}
    attributes.pop("step", None)  # a schedule has wrapped it, in this process
    return attributes | optimizer.__getstate__()


def _make_unbound(
    kind: type[DistributedDataParallel], state: dict[str, Any]
) -> DistributedDataParallel:
    """Create a model without a process group; it is bound to the next group."""
    model = kind.__new__(kind)
    model.__dict__.update(state)
    return model
