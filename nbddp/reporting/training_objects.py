"""The prepared models and the checkpoints of this process.

The training kit adds them. A heal and some extensions look for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary


class WeakList:
    """The living objects of one kind, in order of creation."""

    def __init__(self) -> None:
        self._objects: WeakValueDictionary[int, Any] = WeakValueDictionary()

    def add(self, obj: Any) -> None:
        """Add an object, unless it is in the list."""
        self._objects.setdefault(id(obj), obj)

    def __contains__(self, obj: object) -> bool:
        """Return whether this very object is in the list."""
        return self._objects.get(id(obj)) is obj

    def __iter__(self) -> Iterator[Any]:
        """Iterate in order of creation."""
        references = self._objects.valuerefs()  # a copy: a signal handler may add an object
        return iter([obj for each in references if (obj := each()) is not None])


prepared_models = WeakList()
checkpoints = WeakList()
