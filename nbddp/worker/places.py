"""Which rank an object takes itself for: what came from another rank is told its own.

Most code asks for its rank once and keeps it, as ``DistributedSampler`` does. With a donor's rank
in there a new rank would train on the share of the donor, without anybody noticing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch.distributed as dist
from torch import nn

from nbddp.worker.registry import instances

NAMES = {
    "rank": "RANK",
    "global_rank": "RANK",
    "process_index": "RANK",
    "local_rank": "LOCAL_RANK",
    "local_process_index": "LOCAL_RANK",
}
MAX_DEPTH, MAX_PARTS, MAX_VISITS = 4, 100, 5_000


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is kept: ``path`` is what the user calls it."""

    path: str
    holder: Any
    key: str

    def read(self) -> object:
        """The number, or whatever else is there."""
        return (
            self.holder[self.key] if isinstance(self.holder, dict) else vars(self.holder)[self.key]
        )

    def write(self, number: int) -> None:
        """Put another there; also where an object lets nobody do so."""
        if isinstance(self.holder, dict):
            self.holder[self.key] = number
        else:
            vars(self.holder)[self.key] = number


def own_places(namespace: Mapping[str, Any], own: set[str]) -> list[str]:
    """Where this rank keeps its own number, by what the user calls it.

    Args:
        namespace: the user's names.
        own: names that each rank is given by itself.
    """
    return [each.path for each in _places(namespace, own) if _is(each.read(), _number(each.key))]


def take_places(namespace: Mapping[str, Any], own: set[str], paths: set[str]) -> list[str]:
    """Put this rank's number there; where it was another."""
    taken = []
    for each in _places(namespace, own):
        if each.path in paths and not _is(each.read(), _number(each.key)):
            each.write(_number(each.key))
            taken.append(each.path)
    return taken


def take_samplers(donor: int) -> int:
    """Let all samplers of a donor's data give this rank's share; how many they were."""
    data = sys.modules["torch.utils.data"]
    mine, size = dist.get_rank(), dist.get_world_size()
    samplers = instances([data.DistributedSampler])
    wrong = [each for each in samplers if (each.rank, each.num_replicas) == (donor, size)]
    for each in wrong:
        each.rank = mine
    return len(wrong)


def _number(key: str) -> int:
    return int(os.environ[NAMES[key]])


def _is(value: object, number: int) -> bool:
    return type(value) is int and value == number


def _places(namespace: Mapping[str, Any], own: set[str]) -> Iterator[Place]:
    """What could be one, of objects that are not too deep in others."""
    seen: set[int] = set()
    layer: list[tuple[str, Any]] = []
    names = {name: value for name, value in namespace.items() if name not in own}
    yield from (Place(name, namespace, name) for name in names if name in NAMES)
    layer = [(name, value) for name, value in names.items() if name[:1] != "_"]
    for _ in range(MAX_DEPTH):
        inner: list[tuple[str, Any]] = []
        for path, value in layer:
            if id(value) in seen or len(seen) > MAX_VISITS:
                continue
            seen.add(id(value))
            parts = _parts(path, value)
            yield from (Place(where, value, key) for where, key, _ in parts if key in NAMES)
            inner += [(where, part) for where, _, part in parts]
        layer = inner


def _parts(path: str, value: Any) -> list[tuple[str, str, Any]]:
    """What an object holds: what the user calls it, its key there, and itself."""
    if isinstance(value, dict):
        if len(value) > MAX_PARTS:
            return []
        return [(f"{path}[{key!r}]", key, part) for key, part in value.items() if type(key) is str]
    if isinstance(value, (list, tuple)):
        few = value[:MAX_PARTS]
        return [(f"{path}[{index}]", "", part) for index, part in enumerate(few)]
    kind = type(value)
    if isinstance(value, type | Enum | nn.Module) or kind.__module__ == "builtins":
        return []
    held = getattr(value, "__dict__", None)
    return (
        [(f"{path}.{key}", key, part) for key, part in held.items()] if type(held) is dict else []
    )
