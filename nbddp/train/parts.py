"""What a checkpoint holds, by name: parts with a state, each rank's own ones, and plain values."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbddp.errors import ArgumentError, CheckpointError
from nbddp.train import files, place, sharded, state


def checked_step(step: int) -> int:
    """A step as a plain number.

    >>> checked_step(-1)
    Traceback (most recent call last):
    nbddp.errors.ArgumentError: Checkpoint: step must be 0 or above, got -1
    """
    number = operator.index(step)
    if number < 0:
        raise ArgumentError(f"Checkpoint: step must be 0 or above, got {number}")
    return number


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
        if not _has_state(part):
            given.values[name] = part
        elif _is_own(name, part):
            given.own[name] = part
        else:
            given.parts[name] = _unwrapped(part)
    return given


def _has_state(part: object) -> bool:
    return all(callable(getattr(part, each, None)) for each in ("state_dict", "load_state_dict"))


def _is_own(name: str, part: object) -> bool:
    """Whether each rank has a state of its own: so do loaders, samplers and other iterables."""
    is_loader = name == "loader" or isinstance(part, Iterable)
    return is_loader and not isinstance(part, nn.Module)


def _unwrapped(part: Any) -> Any:
    """A model as it was before DDP and torch.compile, whose names for parameters are longer."""
    while True:
        if isinstance(part, DistributedDataParallel):
            part = part.module
        elif hasattr(part, "_orig_mod"):
            part = part._orig_mod
        else:
            return part


# ---- saving


def taken(parts: dict[str, Any], values: dict[str, Any], take: state.Take) -> dict[str, Any]:
    """The states of the parts, and the values, as plain values.

    Raises:
        CheckpointError: something in them could not be loaded again.
    """
    return {
        "parts": {name: state.plain(part.state_dict(), name, take) for name, part in parts.items()},
        "values": {name: state.plain(value, name, take) for name, value in values.items()},
    }


def of_rank(own: dict[str, Any]) -> dict[str, Any]:
    """What each rank has of its own: its random numbers, and its place in the data."""
    states = {
        name: state.plain(part.state_dict(), name, state.as_it_is) for name, part in own.items()
    }
    return {"random": state.random_state(), "own": states}


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
    def own(self) -> dict[str, Any]:
        """This rank's own parts; rank 0's when there were others than now."""
        states: dict[str, Any] = self._of_rank["own"]
        return states

    @property
    def is_same_world(self) -> bool:
        """Whether there were as many ranks."""
        return bool(self.whole["world_size"] == place.world_size())

    @property
    def _of_rank(self) -> dict[str, Any]:
        found: dict[str, Any] = self.whole["ranks"][place.rank() if self.is_same_world else 0]
        return found

    @property
    def parts(self) -> list[str]:
        """The names of all that has a state."""
        return [*self.spread, *self.whole["parts"], *self.own]

    def restore_random(self) -> None:
        """Go on with this rank's random numbers, if there were as many ranks."""
        if self.is_same_world:
            state.restore_random(self._of_rank["random"])


def read(path: Path) -> Held:
    """Read a checkpoint, but for what is spread."""
    whole: dict[str, Any] = files.read_whole(path / sharded.REST if path.is_dir() else path)
    return Held(path, whole, tuple(whole["spread"]))


def load(path: Path, given: Given) -> Held:
    """Give the parts their states, and this rank its own.

    Returns:
        All that the checkpoint holds.

    Raises:
        CheckpointError: it does not hold what is asked for.
    """
    held = read(path)
    _check(held, given)
    if spread := {name: part for name, part in given.parts.items() if name in held.spread}:
        sharded.load(path, spread)
    for name in given.parts.keys() - spread.keys():
        given.parts[name].load_state_dict(held.whole["parts"][name])
    for name, part in given.own.items():
        part.load_state_dict(held.own[name])  # it divides what is left among the ranks there are
    held.restore_random()
    return held


def left_out(held: Held, given: Given) -> list[str]:
    """Parts that it holds and nobody asked for, not even to leave them out."""
    return [name for name in held.parts if name not in {**given.parts, **given.own, **given.values}]


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
