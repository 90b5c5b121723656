"""What a checkpoint holds: model, optimizer, scheduler, precision, and each rank's own."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

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


def given_parts(**parts: Any) -> dict[str, Any]:
    """Those that are there, without the wrappers of a model.

    Raises:
        TypeError: one of them has no state to save.

    >>> given_parts(model=None)
    {}
    """
    given = {name: _unwrapped(part) for name, part in parts.items() if part is not None}
    for name, part in given.items():
        if not hasattr(part, "state_dict"):
            raise TypeError(
                f"Checkpoint: {name} must have a state_dict(), got {type(part).__name__}; of "
                "several, each needs a Checkpoint in a folder of its own"
            )
    return given


def _unwrapped(part: Any) -> Any:
    """A model as it was before DDP and torch.compile, whose names for parameters are longer."""
    while True:
        if isinstance(part, DistributedDataParallel):
            part = part.module
        elif hasattr(part, "_orig_mod"):
            part = part._orig_mod
        else:
            return part


def split_off_spread(parts: dict[str, Any]) -> dict[str, Any]:
    """Take out what each rank has a piece of; nothing if every rank has the whole model."""
    if not sharded.is_sharded(parts.get("model")):
        return {}
    return _split_off(parts)


def _split_off(parts: dict[str, Any]) -> dict[str, Any]:
    return {"model": parts.pop("model"), "optimizer": parts.pop("optimizer", None)}


def taken(parts: dict[str, Any], extra: Any, take: state.Take) -> dict[str, Any]:
    """The states of the parts, and ``extra``, as plain values.

    Raises:
        CheckpointError: something in them could not be loaded again.
    """
    states = {name: state.plain(part.state_dict(), name, take) for name, part in parts.items()}
    return {"parts": states, "extra": state.plain(extra, "extra", take)}


def of_rank(loader: Any) -> dict[str, Any]:
    """What each rank has of its own: its random numbers, and its place in the data."""
    own = None if loader is None else state.plain(loader.state_dict(), "loader", state.as_it_is)
    return {"random": state.random_state(), "loader": own}


def load(path: Path, parts: dict[str, Any], loader: Any) -> dict[str, Any]:
    """Give the parts their states, and this rank its own.

    Returns:
        All that the checkpoint holds.

    Raises:
        CheckpointError: it does not hold what is asked for.
    """
    spread = {}
    if path.is_dir():
        spread = _split_off(parts) if "model" in parts else {}
    elif sharded.is_sharded(parts.get("model")):
        raise CheckpointError(
            f"{path} holds a whole model and this one is spread over the ranks: load it first and "
            "spread it then"
        )
    whole: dict[str, Any] = files.read_whole(path / sharded.REST if path.is_dir() else path)
    held = whole["parts"] | ({"loader": ...} if whole["ranks"][0]["loader"] is not None else {})
    wanted = [*parts, *(["loader"] if loader is not None else [])]
    _check(path, [name for name in wanted if name not in held], list(held))
    if spread:
        sharded.load(path, **spread)
    for name, part in parts.items():
        part.load_state_dict(whole["parts"][name])
    _give_own(whole, loader)
    return whole


def _check(path: Path, missing: list[str], held: list[str]) -> None:
    if missing:
        raise CheckpointError(
            f"{path} holds no {' and no '.join(missing)}, only {', '.join(held) or 'its step'}"
        )


def _give_own(whole: dict[str, Any], loader: Any) -> None:
    is_same = whole["world_size"] == place.world_size()
    own = whole["ranks"][place.rank() if is_same else 0]
    if loader is not None:
        loader.load_state_dict(own["loader"])  # it divides what is left among the ranks there are
    if is_same:
        state.restore_random(own["random"])
