"""A rank's names for another rank that takes a dead one's place: everything that can be carried.

They are pickled one after the other by one pickler, which knows what it has had. So what belongs
together does so at the other end (an optimizer's parameters are the model's), and code that runs
there when an object is made finds the modules, functions and classes that it uses. What cannot be
pickled is left out, by name, and the rest goes; where it is a part of an object, so does the
object, with a part that says what it was. The memory of tensors is not in the pickle: it can
be sent in whatever way is best, and views share it.
"""

from __future__ import annotations

import copyreg
import functools
import io
import logging
import pickle
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinMethodType, FunctionType, ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import UntypedStorage
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.storage import TypedStorage
from torch.utils.data import DataLoader

from nbddp.formatting import with_article
from nbddp.wire.function_sources import Pickler
from nbddp.wire.request_messages import MADE_BY_ALL
from nbddp.worker.cell.failure import error_text
from nbddp.worker.process_group.migration import GROUP_ATTRIBUTES
from nbddp.worker.watch.namespace import paths_of

_NAMESPACE_ID = "the namespace"
PROTOCOL = 5  # of pickle
MIN_ARRAY_BYTES = 4096  # bytes of an array whose memory is sent as that of a tensor
_LRU_CACHE = type(functools.lru_cache(print))


@dataclass(frozen=True, slots=True)
class PickledNamespace:
    """Names that go to another rank.

    Attributes:
        data: all of them, pickled.
        storages: the memory of their tensors and large arrays, each once.
        names: which.
        left: why not, for each of the others.
    """

    data: bytes
    storages: Sequence[UntypedStorage]
    names: tuple[str, ...]
    not_carried: Mapping[str, str]


class UnpickleError(Exception):
    """A name that was carried could not be made at the other end.

    Attributes:
        name: which.
    """

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(_first_line(error))
        self.name = name


class _NamespacePickler(Pickler):
    """Pickles what lives in a namespace for the same namespace in another process."""

    def __init__(self, file: Any, namespace: dict[str, Any]) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self.file = file
        self._namespace = namespace
        self.globals_ref[id(namespace)] = namespace  # what cloudpickle has for globals of functions
        self._indices: dict[int, int] = {}  # of a storage, by its address in C++
        self.storages: list[UntypedStorage] = []
        self.missing: list[tuple[Any, str]] = []
        self._whole: Any = None
        self._may_lack_parts = False

    def add(self, value: Any, *, may_lack_parts: bool = False) -> None:
        """Pickle one more object; with ``may_lack_parts`` even if not all of it can be."""
        self._whole, self._may_lack_parts = value, may_lack_parts
        self.dump(value)

    def persistent_id(self, obj: Any) -> Any:
        """The namespace itself stays where it is; memory goes another way."""
        if obj is self._namespace:
            return _NAMESPACE_ID
        if isinstance(obj, TypedStorage):
            return self._storage_index(obj._untyped_storage), obj.dtype
        return (self._storage_index(obj), None) if isinstance(obj, UntypedStorage) else None

    def _storage_index(self, storage: UntypedStorage) -> int:
        index = self._indices.setdefault(storage._cdata, len(self.storages))
        if index == len(self.storages):
            self.storages.append(storage)
        return index

    def reducer_override(self, obj: Any) -> Any:
        """Functions of cells see the other rank's names; models wait for their process group."""
        if isinstance(obj, FunctionType) and obj.__globals__ is self._namespace:
            make, arguments, (attributes, looks), *more = self._dynamic_function_reduce(obj)
            return make, arguments, (attributes, looks | {"__globals__": {}}), *more
        if isinstance(obj, _LRU_CACHE):  # which says of itself only what it is called
            return _make_cached, (obj.__wrapped__, obj.cache_parameters())
        if reduced := _custom_reduce(obj):
            return reduced
        if reason := _why_not_movable(obj):
            return self._replace_part(obj, reason)
        if isinstance(obj, logging.Logger) and obj is logging.getLogger(obj.name):
            return _make_logger, (obj.name, obj.level, obj.propagate, obj.disabled)
        reduced = super().reducer_override(obj)
        is_by_name = isinstance(obj, (type, FunctionType))  # that of a module, here
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
    """Takes the place of an object that was deleted. On the new rank it is deleted, too."""


class _NamespaceUnpickler(pickle.Unpickler):
    """Opens it in the other process."""

    def __init__(
        self, data: bytes, namespace: dict[str, Any], storages: Sequence[UntypedStorage]
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._namespace = namespace
        self._storages = storages

    def persistent_load(self, pid: Any) -> Any:
        """The namespace of this process, or memory that was made for it here."""
        if pid == _NAMESPACE_ID:
            return self._namespace
        index, dtype = pid
        storage = self._storages[index]
        if dtype is None:
            return storage
        return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def pickle_namespace(
    namespace: dict[str, Any], exclude: Iterable[str] = (), extra: Any = None
) -> PickledNamespace:
    """Pickle a namespace's names, but those that are to be left.

    Args:
        namespace: where the cells' functions look names up.
        exclude: names that are the rank's own, or the shell's.
        extra: what else :func:`load_namespace` shall hand over.

    >>> step = [3]
    >>> carried = pickle_namespace({"step": step, "same": step, "gate": (n for n in ())})
    >>> carried.names, carried.left
    (('step', 'same'), {'gate': "cannot pickle 'generator' object"})
    >>> there = {}
    >>> load_namespace(carried.data, there, carried.storages)
    >>> there["step"] is there["same"]
    True
    """
    exclude = {*exclude}
    names = {name: value for name, value in namespace.items() if name not in exclude}
    not_carried: dict[str, str] = {}
    broken: set[str] = set()
    packer, reason = _pickle_names(names, namespace, extra)
    if reason:
        for name, value in names.items():
            if not _pickle_names({name: value}, namespace)[1]:
                continue
            parts, reason = _pickle_names({name: value}, namespace, broken={name})
            not_carried |= (
                {name: reason} if reason else _describe_missing(name, value, parts.missing)
            )
            broken.add(name)
        names = {name: value for name, value in names.items() if name not in not_carried}
        packer, reason = _pickle_names(names, namespace, extra, broken)
        if reason:
            raise pickle.PicklingError(reason)
    return PickledNamespace(packer.file.getvalue(), packer.storages, tuple(names), not_carried)


def _describe_missing(name: str, whole: Any, missing: Sequence[tuple[Any, str]]) -> dict[str, str]:
    """The parts of an object that could not be carried, and why not."""
    known = paths_of([part for part, _ in missing], {name: whole})
    descriptions: dict[str, str] = {}
    for number, (part, reason) in enumerate(missing, start=1):
        what = known.get(id(part), f"{_type_with_article(part)} in {name}")
        descriptions[f"{what} ({number})" if what in descriptions else what] = reason
    return descriptions


def load_namespace(
    data: bytes,
    namespace: dict[str, Any],
    storages: Sequence[UntypedStorage],
    on_extra: Callable[[Any], None] = lambda _: None,
) -> None:
    """Put names that were carried into this process's namespace.

    ``storages`` is memory of the sizes that it has at the other end; it may be filled later.
    ``on_extra`` is called with what was packed as ``extra``, before the names are opened.

    Raises:
        UnpickleError: one could not be made here; the namespace is as it was before.
    """
    opener = _NamespaceUnpickler(data, namespace, storages)
    names, extra = opener.load()
    on_extra(extra)
    before = dict(namespace)
    for name in names:
        try:
            namespace[name] = opener.load()
        except Exception as error:
            namespace.clear()
            namespace.update(before)
            raise UnpickleError(name, error) from error
    if "__builtins__" in before:  # cloudpickle sets it, to a dict, for each function that it makes
        namespace["__builtins__"] = before["__builtins__"]


def _pickle_names(
    names: Mapping[str, Any],
    namespace: dict[str, Any],
    extra: Any = None,
    broken: Container[str] = (),
) -> tuple[_NamespacePickler, str]:
    """The names pickled, the broken ones without what cannot be; or why not."""
    packer = _NamespacePickler(io.BytesIO(), namespace)
    # what others may need while they are made comes first: modules, then classes and functions
    first = [each for each in names if isinstance(names[each], ModuleType)]
    then = [each for each in names if isinstance(names[each], (type, FunctionType))]
    order = [*dict.fromkeys((*first, *then, *names))]
    try:
        packer.add((order, extra))
        for name in order:
            packer.add(names[name], may_lack_parts=name in broken)
    except Exception as error:  # noqa: BLE001 - whatever an object's own code says; it is told
        return packer, _first_line(error)
    return packer, ""


def _why_not_movable(obj: Any) -> str:
    """What only its own process can have, or all ranks together; nothing of all else."""
    if isinstance(obj, io.IOBase) and not isinstance(obj, (io.BytesIO, io.StringIO)):
        return f"{_type_with_article(obj)} that is open belongs to its process"
    if isinstance(obj, threading.Thread):
        return f"{_type_with_article(obj)} belongs to its process"
    return MADE_BY_ALL if isinstance(obj, dist.ProcessGroup) else ""


def _type_with_article(value: Any) -> str:
    return with_article(type(value).__name__.strip("_"))


def _first_line(error: BaseException) -> str:
    return _message_of(error).partition("\n")[0] or type(error).__name__


# ---- what cannot be carried


class Placeholder:
    """Takes the place of an object that was not carried. Every use raises an error that says so.

    With a lock that never blocks, or an empty queue, the user's code would fail without a reason.
    """

    def __init__(self, what: str) -> None:
        vars(self)["_what"] = what

    def __repr__(self) -> str:
        """Return what it stands for."""
        return f"<{self._describe()}>"

    def _describe(self) -> str:
        what = vars(self).get("_what", "an object")
        return f"{what} of another rank, which could not be carried here: make it again"

    def __getattr__(self, name: str) -> NoReturn:
        """Raise the error. Lookups of Python itself, such as ``__len__``, get the usual text."""
        raise AttributeError(name if name[:2] == "__" else self._describe())

    def _raise_error(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(self._describe())

    __call__ = __enter__ = __iter__ = __next__ = __len__ = __bool__ = _raise_error
    __getitem__ = __setitem__ = __contains__ = __setattr__ = _raise_error

    def __exit__(self, *_: object) -> None:
        """Let ``with`` come to ``__enter__``: without this method it raises another error."""


def _why_unpicklable(part: Any, reducers: Any) -> str:
    """Return why a part of an object cannot be pickled; empty if its class does not refuse."""
    if isinstance(part, BuiltinMethodType):
        owner = part.__self__
        return "" if isinstance(owner, (ModuleType, type)) else _why_unpicklable(owner, reducers)
    reduce = reducers.get(type(part))
    try:
        reduce(part) if reduce else part.__reduce_ex__(PROTOCOL)
    except Exception as error:  # noqa: BLE001 - whatever an object's own code says; it is told
        return _message_of(error) or type(error).__name__
    return ""


def _message_of(error: BaseException) -> str:
    """Return the text of an exception, also of one whose text is a format with its arguments.

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


def _custom_reduce(obj: Any) -> Any:
    """Reduce objects that pickle refuses, or would not restore whole; None for all others."""
    if type(obj) is weakref.ReferenceType:
        target = obj()
        return weakref.ref, (_DeadReferent() if target is None else target,)
    if shared := _shared_dict(obj):
        return _make_sharing, (type(obj), shared), vars(obj).copy()
    if isinstance(obj, DistributedDataParallel):
        state = {key: value for key, value in vars(obj).items() if key not in GROUP_ATTRIBUTES}
        return _make_unbound, (type(obj), state)
    if isinstance(obj, Optimizer) and type(obj).__getstate__ is Optimizer.__getstate__:
        return copyreg.__newobj__, (type(obj),), _optimizer_state(obj)  # type: ignore[attr-defined]
    if isinstance(obj, DataLoader) and getattr(obj, "_iterator", None) is not None:
        match obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL):
            case (make, arguments, {"_iterator": _, **rest}, *more):  # torch starts new workers
                return make, arguments, {**rest, "_iterator": None}, *more
            case reduced:  # a class that pickles itself in its own way
                return reduced
    # of another array the pickle keeps the order of its memory, and that it is read-only
    is_large = type(obj) is np.ndarray and obj.nbytes >= MIN_ARRAY_BYTES
    if is_large and obj.flags.carray and not obj.dtype.hasobject:
        memory = torch.from_numpy(obj.reshape(-1).view(np.uint8))
        return _make_array, (memory, obj.dtype, obj.shape)
    return None


def _make_array(memory: torch.Tensor, dtype: Any, shape: tuple[int, ...]) -> Any:
    return memory.numpy().view(dtype).reshape(shape)


def _shared_dict(obj: Any) -> str:
    """Return the name of the class attribute that is the object's ``__dict__``; empty if none is.

    All objects of such a class share their attributes.
    """
    own = getattr(obj, "__dict__", None)
    if type(own) is not dict or isinstance(obj, type):
        return ""
    return next((name for name, value in vars(type(obj)).items() if value is own), "")


def _make_sharing(kind: Any, shared: str) -> Any:
    """Make an object whose ``__dict__`` is this attribute of its class."""
    made = kind.__new__(kind)
    made.__dict__ = getattr(kind, shared)
    return made


def _optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return what torch pickles and all other attributes, such as an optimizer that it wraps."""
    plain = vars(Optimizer([torch.zeros(1)], {}))
    own = {key: value for key, value in vars(optimizer).items() if key not in plain}
    own.pop("step", None)  # a schedule has wrapped it for this process
    return own | optimizer.__getstate__()


def _make_unbound(
    kind: type[DistributedDataParallel], state: dict[str, Any]
) -> DistributedDataParallel:
    """A model that is bound when there is a process group again."""
    model = kind.__new__(kind)
    model.__dict__.update(state)
    return model
