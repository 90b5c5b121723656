"""What a checkpoint holds, by name: parts with a state, each rank's own ones, and plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbddp.errors import CheckpointError
from nbddp.train import this_rank
from nbddp.train.checkpoint import atomic_files, sharded, state_dicts

_STATEFUL = ("state_dict", "load_state_dict")


@dataclass(frozen=True, slots=True)
class Given:
    """What ``save`` or ``resume`` was given, by name.

    Attributes:
        parts: have a state that is the same on all ranks; without the wrappers of models.
        own: have a state of their own on each rank, as loaders do.
        values: all else.
    """

    parts: dict[str, Any]
    own: dict[str, Any]
    values: dict[str, Any]

    def spread(self) -> dict[str, Any]:
        """The parts of which each rank has a piece."""
        return {name: part for name, part in self.parts.items() if sharded.is_spread(part)}


def given_parts(everything: Mapping[str, Any]) -> Given:
    """Tell what has a state from what is a value.

    >>> given_parts({"best": 0.5})
    Given(parts={}, own={}, values={'best': 0.5})
    """
    given = Given({}, {}, {})
    for name, part in everything.items():
        if not all(callable(getattr(part, each, None)) for each in _STATEFUL):
            given.values[name] = part
        elif (name == "loader" or isinstance(part, Iterable)) and not isinstance(part, nn.Module):
            given.own[name] = part  # each rank has a state of its own of loaders and samplers
        else:
            given.parts[name] = _unwrapped(part)
    return given


def _unwrapped(part: Any) -> Any:
    """A model as it was before DDP and torch.compile, whose names for parameters are longer."""
    while isinstance(part, DistributedDataParallel) or hasattr(part, "_orig_mod"):
        part = part.module if isinstance(part, DistributedDataParallel) else part._orig_mod
    return part


# ---- saving


def taken(parts: dict[str, Any], values: dict[str, Any], take: state_dicts.Take) -> dict[str, Any]:
    """The states of the parts, and the values, as plain values.

    Raises:
        CheckpointError: something in them could not be loaded again.
    """
    return {
        "parts": {
            name: state_dicts.plain(part.state_dict(), name, take) for name, part in parts.items()
        },
        "values": {name: state_dicts.plain(value, name, take) for name, value in values.items()},
    }


def of_rank(own: dict[str, Any]) -> dict[str, Any]:
    """What each rank has of its own: its random numbers, and its place in the data."""
    return {
        "random": state_dicts.random_state(),
        "own": taken(own, {}, state_dicts.as_it_is)["parts"],
    }


# ---- resuming


@dataclass(frozen=True, slots=True)
class Held:
    """What a checkpoint holds.

    Attributes:
        path: of the checkpoint.
        whole: all of it but what is spread: step, world size, and by name parts and values; and
            for each rank its random numbers and its own parts.
        spread: names of parts of which each rank wrote a piece.
    """

    path: Path
    whole: dict[str, Any]
    spread: tuple[str, ...]

    @property
    def is_same_world(self) -> bool:
        """Whether there were as many ranks."""
        return bool(self.whole["world_size"] == this_rank.world_size())

    @property
    def of_rank(self) -> dict[str, Any]:
        """This rank's random numbers and own parts; rank 0's if there were more or fewer ranks."""
        found: dict[str, Any] = self.whole["ranks"][this_rank.rank() if self.is_same_world else 0]
        return found

    @property
    def parts(self) -> list[str]:
        """The names of all that has a state."""
        return [*self.spread, *self.whole["parts"], *self.of_rank["own"]]


def load(path: Path, given: Given) -> Held:
    """Give the parts their states, and this rank its own.

    Returns:
        All that the checkpoint holds.

    Raises:
        CheckpointError: it does not hold what is asked for.
    """
    whole: dict[str, Any] = atomic_files.read_whole(path / sharded.REST if path.is_dir() else path)
    held = Held(path, whole, tuple(whole["spread"]))
    _check(held, given)
    if spread := {name: part for name, part in given.parts.items() if name in held.spread}:
        sharded.load(path, spread)
    for name in given.parts.keys() - spread.keys():
        given.parts[name].load_state_dict(whole["parts"][name])
    for name, part in given.own.items():
        part.load_state_dict(
            held.of_rank["own"][name]
        )  # it divides what is left among the ranks there are
    if held.is_same_world:
        state_dicts.restore_random(held.of_rank["random"])
    return held


def _check(held: Held, given: Given) -> None:
    values = held.whole["values"]
    wanted = {**given.parts, **given.own}
    missing = [f"state of {name}" for name in wanted if name not in held.parts]
    given_values = [name for name, value in given.values.items() if value is not None]
    missing += [f"value {name}" for name in given_values if name not in values]
    if missing:
        found = [f"the state of {name}" for name in held.parts]
        found += [f"the value {name}" for name in values]
        raise CheckpointError(
            f"{held.path} holds no {' and no '.join(missing)}; "
            f"it holds {', '.join(found) or 'nothing but its step'}"
        )
    if whole := [name for name in given.spread() if name not in held.spread]:
        raise CheckpointError(
            f"{held.path} holds a whole {whole[0]} and this one is spread over the ranks: load it "
            "first and spread it then"
        )
