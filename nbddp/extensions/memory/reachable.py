"""Find the objects that keep each other alive, without running code of the user."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from types import FrameType, ModuleType
from typing import Any

from nbddp.worker.tracebacks import HIDDEN
from nbddp.worker.watch.main_thread import library_of_file
from nbddp.worker.watch.namespace import PLAIN

MAX_VISITS = 200_000  # objects of one root to look into
# packages whose objects lead to everything in the process
_OPAQUE = ("nbddp.worker", "nbddp.wire", "IPython", "traitlets", "logging")
_CONTAINERS = frozenset(map(id, (dict, list, set, tuple)))


class Reachable:
    """Walks over the objects that roots hold, each object once for all roots.

    It does not look into modules and their classes, because these lead to all other objects.

    Args:
        apart: objects that are left out, because they are roots of their own later.
    """

    def __init__(self, namespace: dict[str, Any], apart: Iterable[Any] = ()) -> None:
        modules = [vars(each) for each in [*sys.modules.values()] if hasattr(each, "__dict__")]
        self._seen = {*map(id, modules), id(namespace), *map(id, apart)}

    def root(self, obj: Any) -> Iterator[Any]:
        """Yield an object, even if it was left out, and all that it holds."""
        self._seen.discard(id(obj))
        return self.of(obj)

    def of(self, obj: Any) -> Iterator[Any]:
        """Yield an object and all that it holds, without containers, and each object once."""
        layer, visits = [obj], 0
        while layer and visits < MAX_VISITS:
            found = []
            for part in layer:
                if id(type(part)) not in PLAIN and id(part) not in self._seen and _may_hold(part):
                    self._seen.add(id(part))
                    found.append(part)
            visits += len(found)
            yield from (part for part in found if id(type(part)) not in _CONTAINERS)
            layer = [*chain.from_iterable(map(_parts, found[:MAX_VISITS]))]


def _parts(obj: Any) -> Iterable[Any]:
    if not isinstance(obj, FrameType):
        return gc.get_referents(obj)
    return () if obj.f_locals is obj.f_globals else obj.f_locals.values()


def _may_hold(obj: Any) -> bool:
    kind = type(obj)
    if not gc.is_tracked(obj) and kind.__name__ != "ndarray":
        return False
    if id(kind) in _CONTAINERS:
        return True
    if issubclass(kind, FrameType):
        return is_visible(obj)
    if issubclass(kind, type):
        return bool(obj.__module__ == "__main__")
    return not issubclass(kind, ModuleType) and not str(kind.__module__).startswith(_OPAQUE)


def is_visible(frame: FrameType) -> bool:
    """Return whether a frame is not one of nbddp or IPython."""
    return library_of_file(frame.f_code.co_filename) not in HIDDEN
