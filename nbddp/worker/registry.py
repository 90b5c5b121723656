"""What lives in this rank and is bound to a process group, whatever the user calls it.

Most code keeps its model in an object of its own, or behind ``torch.compile``. So DDP models,
optimizers and schedules are noted when they are made; weakly, for nobody shall live longer by it.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from operator import attrgetter
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

MAX_DEPTH = 4  # of ``trainer.models["a"].inner``; deeper ones go without a name
MAX_VISITS = 20_000  # objects that are looked at to find a name
MAX_PARTS = 200  # parts of one object; with a list of 30 million numbers the search took 45 s
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})  # they hold nothing
T = TypeVar("T")


class Roll:
    """The living objects of one kind, in the order in which they were made."""

    def __init__(self) -> None:
        self._objects: WeakValueDictionary[int, Any] = WeakValueDictionary()

    def note(self, one: Any) -> None:
        """Put an object on the roll, once."""
        self._objects.setdefault(id(one), one)

    def __iter__(self) -> Iterator[Any]:
        """In the order in which they were made."""
        return iter(list(self._objects.values()))


class _Optimizers(Roll):
    """Without wrappers, such as Lightning Fabric's: the optimizer inside has all that counts."""

    def __iter__(self) -> Iterator[Any]:
        """In the order in which they were made."""
        return (each for each in super().__iter__() if not _wraps(each))


def _wraps(optimizer: Optimizer) -> bool:
    inner = (each for each in vars(optimizer).values() if isinstance(each, Optimizer))
    return any(getattr(optimizer, "state", None) is each.state for each in inner)


class Registry:
    """Every DDP model, optimizer and learning-rate schedule of this process."""

    def __init__(self) -> None:
        self.models = Roll()
        self.optimizers = _Optimizers()
        self.schedules = Roll()

    def listen(self) -> None:
        """From here on, whatever is made, unpickled or copied is noted."""
        kinds: list[tuple[type, Roll]] = [
            (DistributedDataParallel, self.models),
            (Optimizer, self.optimizers),
            (LRScheduler, self.schedules),
            (ReduceLROnPlateau, self.schedules),
        ]
        for kind, roll in kinds:
            _note_after(kind, "__init__", roll)
            if hasattr(kind, "__setstate__"):
                _note_after(kind, "__setstate__", roll)

    def find(self) -> None:
        """Note what is there and was not seen being made: it was opened without its own code."""
        kinds: list[tuple[Any, Roll]] = [
            ((DistributedDataParallel,), self.models),
            ((Optimizer,), self.optimizers),
            ((LRScheduler, ReduceLROnPlateau), self.schedules),
        ]
        for kind, roll in kinds:
            for each in instances(kind):
                roll.note(each)


def _note_after(kind: type, method: str, roll: Roll) -> None:
    original = getattr(kind, method)

    @functools.wraps(original)
    def noting(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        roll.note(self)

    setattr(kind, method, noting)


def instances(kinds: Iterable[type]) -> list[Any]:
    """The objects of these types and of those made from them; none of their code runs."""
    family = [*kinds]
    for kind in family:  # it grows meanwhile
        family += type.__subclasses__(kind)
    known = {id(kind) for kind in family}
    referrers = gc.get_referrers(*family)  # an object refers to its type; Python looks far slower
    return [each for each in referrers if id(type(each)) in known]


def loaders() -> list[Any]:
    """Those of ``nbddp.loader`` that train, in the order in which they were made."""
    data = sys.modules.get("nbddp.train.data")
    found = [] if data is None else instances([data.Loader])
    return sorted((each for each in found if not each.is_evaluation), key=attrgetter("number"))


def is_sharded(optimizer: Any) -> bool:
    """Whether it keeps a part of the state on each rank, as ZeroRedundancyOptimizer does."""
    return "process_group" in vars(optimizer)


def sharded_modules() -> list[nn.Module]:
    """The outermost modules that FSDP, old or new, has cut up."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    names = ("FullyShardedDataParallel", "FSDPModule")
    kinds = tuple(kind for kind in (getattr(fsdp, name, None) for name in names) if kind)
    if not kinds:
        return []
    found = instances(kinds)
    inner = {id(part) for each in found for part in each.modules() if part is not each}
    return [each for each in found if id(each) not in inner]


def names_of(targets: Iterable[Any], namespace: Mapping[str, Any]) -> dict[int, str]:
    """What the user calls these objects: ``model``, ``trainer.model``, ``models['a']``.

    Returns:
        The shortest way to each object, by its id; what nobody can reach by name is left out.

    >>> model = [1]
    >>> names_of([model], {"kept": {"a": model}})[id(model)]
    "kept['a']"
    """
    wanted = {id(each) for each in targets}
    found: dict[int, str] = {}
    seen: set[int] = set()
    layer = [(name, value) for name, value in sorted(namespace.items()) if name[:1] != "_"]
    for _ in range(MAX_DEPTH):
        if len(found) == len(wanted):
            break
        inner: list[tuple[str, Any]] = []
        for name, value in layer:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if id(value) in wanted:
                found[id(value)] = name
            elif len(seen) < MAX_VISITS:
                inner += _parts(name, value)
        layer = inner
    return found


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the first parts of an object that are not plain, with their names."""
    if isinstance(value, dict):
        parts = _few(value.items())
        return [(f"{name}[{key!r}]", part) for key, part in parts if _is_short(key)]
    if isinstance(value, (list, tuple)):
        return [(f"{name}[{index}]", part) for index, part in _few(enumerate(value))]
    if isinstance(value, (ModuleType, type, torch.Tensor)) or not hasattr(value, "__dict__"):
        return []
    held = [(f"{name}.{key}", part) for key, part in _few(vars(value).items()) if key[:1] != "_"]
    if isinstance(value, nn.Module):  # what torch.compile wraps is the same to the user
        held += [
            (name if key == "_orig_mod" else f"{name}.{key}", part)
            for key, part in _few(value._modules.items())
        ]
    return held


def _few(parts: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return those of the first parts that may hold something."""
    return [each for each in islice(parts, MAX_PARTS) if type(each[1]) not in PLAIN]


def _is_short(key: object) -> bool:
    return isinstance(key, (str, int)) and len(str(key)) < 40
