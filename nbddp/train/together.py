"""What all ranks do and all learn of: where it fails on one, it fails on every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from nbddp.errors import CheckpointError
from nbddp.train import place
from nbddp.train.distributed import all_gather

T = TypeVar("T")


def together(act: Callable[[], T]) -> list[T]:
    """Act on every rank and meet; what came of it, in order of rank.

    Raises:
        CheckpointError: it failed on another rank, whose words it has.
        Exception: it failed on this rank; whatever that was.

    >>> together(lambda: 7)
    [7]
    """
    if place.world_size() == 1:
        return [act()]
    mine: Any = None
    failure: Exception | None = None
    try:
        mine = act()
    except Exception as error:  # noqa: BLE001 - the others wait, and are to hear of it
        failure = error
    outcomes = all_gather((_words(failure), mine))
    if failure is not None:
        raise failure
    for rank, (words, _) in enumerate(outcomes):
        if words:
            raise CheckpointError(f"rank {rank}: {words}")
    return [outcome for _, outcome in outcomes]


def _words(failure: Exception | None) -> str:
    if failure is None or isinstance(failure, CheckpointError):
        return str(failure or "")
    return f"{type(failure).__name__}: {failure}"
