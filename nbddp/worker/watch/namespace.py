"""Walk over the objects that the user's names lead to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

DEPTH = 4  # levels, as in ``trainer.models["a"].inner``
MAX_VISITS = 20_000  # objects whose parts are yielded
MAX_PARTS = 200  # parts of one object; with a list of 30 million numbers a walk took 45 s
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})  # they have no parts
Found = tuple[str, Any, Any]  # the path, the key in the holder, and the value


class Part(NamedTuple):
    """An object, and where it is: ``path`` is the expression with which the user reaches it."""

    path: str
    holder: Any
    key: Any
    value: Any


def walk(namespace: Mapping[str, Any]) -> Iterator[Part]:
    """Yield what the names lead to, the shortest paths first.

    A walk goes into dicts, lists, tuples and attributes, and into each object once. It runs no
    properties. Names that begin with an underscore are left out.

    >>> [part.path for part in walk({"trainer": {"rank": 1, "parts": [None]}})]
    ['trainer', "trainer['rank']", "trainer['parts']", "trainer['parts'][0]"]
    """
    names = ((name, name, value) for name, value in sorted(namespace.items()) if name[:1] != "_")
    layer: list[tuple[Any, Iterable[Found]]] = [(namespace, names)]
    seen = {id(namespace)}
    for _ in range(DEPTH):
        inner: list[tuple[Any, Iterable[Found]]] = []
        for holder, parts in layer:
            for path, key, value in parts:
                yield Part(path, holder, key, value)
                is_new = type(value) not in PLAIN and id(value) not in seen
                if is_new and len(seen) < MAX_VISITS:
                    seen.add(id(value))
                    inner.append((value, _parts(path, value)))
        layer = inner


def _parts(path: str, holder: Any) -> Iterable[Found]:
    if isinstance(holder, dict):
        few = [*islice(holder.items(), MAX_PARTS)]
        return ((f"{path}[{key!r}]", key, value) for key, value in few if _is_short(key))
    if isinstance(holder, (list, tuple)):
        return ((f"{path}[{at}]", at, value) for at, value in islice(enumerate(holder), MAX_PARTS))
    held = getattr(holder, "__dict__", None)
    if isinstance(holder, (ModuleType, Enum, torch.Tensor)) or type(held) is not dict:
        return ()
    parts = [(f"{path}.{key}", key, value) for key, value in islice(held.items(), MAX_PARTS)]
    if isinstance(holder, nn.Module):
        parts = [each for each in parts if each[1][:1] != "_"]
        for key, value in islice(holder._modules.items(), MAX_PARTS):
            # a model that torch.compile wraps has the name of the wrapper
            parts.append((path if key == "_orig_mod" else f"{path}.{key}", key, value))
    return parts


def _is_short(key: object) -> bool:
    return isinstance(key, (str, int)) and len(str(key)) < 40


def names_of(targets: Iterable[Any], namespace: Mapping[str, Any]) -> dict[int, str]:
    """Return the shortest path to each object, by the object's id.

    Objects that no path leads to are left out.

    >>> model = [1]
    >>> names_of([model], {"kept": {"a": model}})[id(model)]
    "kept['a']"
    """
    wanted = {id(each) for each in targets}
    found: dict[int, str] = {}
    for part in walk(namespace):
        if len(found) == len(wanted):
            break
        if id(part.value) in wanted:
            found.setdefault(id(part.value), part.path)
    return found
