"""Walk over the objects that are reachable from the user's variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from itertools import chain, islice
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

DEPTH = 4  # levels, as in ``trainer.models["a"].inner``
MAX_VISITS = 20_000  # objects to look into
MAX_PARTS = 200  # parts of one object; a list of 30 million numbers took 45 s
# types without parts, by id: a class has no hash if its metaclass has an __eq__
PLAIN = frozenset(map(id, (bool, int, float, complex, str, bytes, type(None))))


class Part(NamedTuple):
    """An object and its holder. ``path`` is the Python expression that evaluates to it."""

    path: str
    holder: Any
    key: Any
    value: Any


def walk(namespace: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the reachable objects, those with the shortest paths first.

    Visit the items of dicts, lists and tuples, and attributes, and look into each object once. Call
    no properties. Skip variables that begin with an underscore.

    >>> [part.path for part in walk({"trainer": {"rank": 1, "parts": [None]}})]
    ['trainer', "trainer['rank']", "trainer['parts']", "trainer['parts'][0]"]
    """
    names = ((name, value) for name, value in sorted(namespace.items()) if name[:1] != "_")
    layer: list[Iterable[Part]] = [(Part(name, namespace, name, value) for name, value in names)]
    seen = {id(namespace)}
    for _ in range(DEPTH):
        inner: list[Iterable[Part]] = []
        for part in chain.from_iterable(layer):
            yield part
            is_new = id(type(part.value)) not in PLAIN and id(part.value) not in seen
            if is_new and len(seen) < MAX_VISITS:
                seen.add(id(part.value))
                with suppress(Exception):  # a class or proxy of the user may raise anything
                    inner.append([*_parts(part.path, part.value)])
        layer = inner


def _parts(path: str, holder: Any) -> Iterable[Part]:
    if isinstance(holder, dict):
        items = [*islice(holder.items(), MAX_PARTS)]
        simple = (each for each in items if isinstance(each[0], (str, int)))
        short = [each for each in simple if len(str(each[0])) < 40]
        return (Part(f"{path}[{key!r}]", holder, key, value) for key, value in short)
    if isinstance(holder, (list, tuple)):
        first = islice(enumerate(holder), MAX_PARTS)
        return (Part(f"{path}[{at}]", holder, at, value) for at, value in first)
    attributes = getattr(holder, "__dict__", None)
    if isinstance(holder, (ModuleType, Enum, torch.Tensor)) or type(attributes) is not dict:
        return ()
    items = [*islice(attributes.items(), MAX_PARTS)]
    parts = [Part(f"{path}.{key}", holder, key, value) for key, value in items]
    if isinstance(holder, nn.Module):
        parts = [each for each in parts if each.key[:1] != "_"]
        for key, value in islice(holder._modules.items(), MAX_PARTS):
            # a model wrapped by torch.compile has the path of its wrapper
            name = path if key == "_orig_mod" else f"{path}.{key}"
            parts.append(Part(name, holder, key, value))
    return parts


def paths_of(targets: Iterable[Any], namespace: Mapping[str, Any]) -> dict[int, str]:
    """Return the shortest path to each object, by the object's id.

    Leave out objects without a path.

    >>> model = [1]
    >>> paths_of([model], {"kept": {"a": model}})[id(model)]
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
