"""The contents of a checkpoint: shared parts, parts of each rank, and plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbddp.errors import CheckpointError
from nbddp.extensions.train.checkpoint import atomic_files, sharded, state_dicts
from nbddp.reporting import this_rank
from nbddp.sharding import has_dtensors

_STATEFUL = ("state_dict", "load_state_dict")


@dataclass(frozen=True, slots=True)
class Parts:
    """The arguments of ``save`` or ``resume``, by name.

    Attributes:
        shared: parts whose state is the same on all ranks; models without their wrappers.
        per_rank: parts with another state on each rank, such as loaders.
        values: plain values.
    """

    shared: dict[str, Any]
    per_rank: dict[str, Any]
    values: dict[str, Any]

    def sharded_parts(self) -> dict[str, Any]:
        """Return the parts of which each rank has a shard."""
        return {name: part for name, part in self.shared.items() if has_dtensors(part)}


def split_parts(everything: Mapping[str, Any]) -> Parts:
    """Sort arguments into shared parts, parts of each rank, and plain values.

    >>> split_parts({"best": 0.5})
    Parts(shared={}, per_rank={}, values={'best': 0.5})
    """
    given = Parts({}, {}, {})
    for name, part in everything.items():
        if not all(callable(getattr(part, each, None)) for each in _STATEFUL):
            given.values[name] = part
        elif (name == "loader" or isinstance(part, Iterable)) and not isinstance(part, nn.Module):
            given.per_rank[name] = part  # the state of a loader or sampler differs between ranks
        else:
            given.shared[name] = _unwrapped(part)
    return given


def _unwrapped(part: Any) -> Any:
    """Return the model inside DDP and torch.compile, which add prefixes to parameter names."""
    while isinstance(part, DistributedDataParallel) or hasattr(part, "_orig_mod"):
        part = part.module if isinstance(part, DistributedDataParallel) else part._orig_mod
    return part


# ---- resuming


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """The contents of a checkpoint.

    Attributes:
        path: the path of the checkpoint.
        state: the contents without sharded parts: step, world size, parts and values by name, and
            for each rank its random state and its own parts.
    """

    path: Path
    state: dict[str, Any]

    @property
    def sharded_names(self) -> list[str]:
        """The names of the parts of which each rank wrote a shard."""
        return [*self.state["spread"]]

    @property
    def is_same_world(self) -> bool:
        """Whether the checkpoint was saved with the current world size."""
        return bool(self.state["world_size"] == this_rank.world_size())

    @property
    def rank_state(self) -> dict[str, Any]:
        """The random state and parts of this rank; of rank 0 if the world size has changed."""
        found: dict[str, Any] = self.state["ranks"][this_rank.rank() if self.is_same_world else 0]
        return found

    @property
    def part_names(self) -> list[str]:
        """The names of all parts with a state."""
        return [*self.sharded_names, *self.state["parts"], *self.rank_state["own"]]


def load(path: Path, given: Parts) -> CheckpointContents:
    """Load a checkpoint into the parts, and restore the random state of this rank.

    Returns:
        The contents of the checkpoint.

    Raises:
        CheckpointError: the checkpoint lacks a given part or value.
    """
    state: dict[str, Any] = atomic_files.read_plain(
        path / sharded.UNSHARDED_FILE if path.is_dir() else path
    )
    contents = CheckpointContents(path, state)
    _check(contents, given)
    parts = given.shared
    if of_shards := {name: parts[name] for name in parts if name in contents.sharded_names}:
        sharded.load(path, of_shards)
    for name in parts.keys() - of_shards.keys():
        parts[name].load_state_dict(state["parts"][name])
    for name, part in given.per_rank.items():
        # a loader divides the remaining samples among the current ranks
        part.load_state_dict(contents.rank_state["own"][name])
    if contents.is_same_world:
        state_dicts.restore_random(contents.rank_state["random"])
    return contents


def _check(contents: CheckpointContents, given: Parts) -> None:
    values = contents.state["values"]
    wanted = {**given.shared, **given.per_rank}
    missing = [f"state of {name}" for name in wanted if name not in contents.part_names]
    given_values = [name for name, value in given.values.items() if value is not None]
    missing += [f"value {name}" for name in given_values if name not in values]
    if missing:
        found = [f"the state of {name}" for name in contents.part_names]
        found += [f"the value {name}" for name in values]
        raise CheckpointError(
            f"{contents.path} holds no {' and no '.join(missing)}; "
            f"it holds {', '.join(found) or 'nothing but its step'}"
        )
    not_sharded = [name for name in given.sharded_parts() if name not in contents.sharded_names]
    if not_sharded:
        raise CheckpointError(
            f"{contents.path} holds an unsharded {not_sharded[0]}, but this one is sharded over "
            "the ranks: load it first, then shard it"
        )
