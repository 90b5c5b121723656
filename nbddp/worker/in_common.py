"""What all ranks have, of what each of them has: things are the same if they are made alike."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


class Plan:
    """What every rank would take along if nothing fails; once something has, they ask again.

    Args:
        everyone: of each rank, the signatures of its things by their kind.

    Attributes:
        holds: whether it went as planned until now: on all ranks, or on none.
    """

    def __init__(self, everyone: Sequence[Mapping[str, Sequence[str]]]) -> None:
        self._everyone = everyone
        self.holds = _are_equal(everyone)

    def told(self, kind: str) -> list[Sequence[str]] | None:
        """The signatures of each rank's things of this kind; None where they must be asked."""
        return [each[kind] for each in self._everyone] if self.holds else None


def _are_equal(everyone: Sequence[Mapping[str, Sequence[str]]]) -> bool:
    """Whether all ranks have the same things, in whatever order."""
    counts = [{kind: Counter(signs) for kind, signs in each.items()} for each in everyone]
    return all(each == counts[0] for each in counts)


def is_clear(told: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no rank has anything that another may have let go of, or nobody has any more."""
    return _are_equal([each["signatures"] for each in told]) and all(
        each["is named"] for each in told
    )


def pair(everyone: Sequence[Sequence[str]], rank: int) -> list[int]:
    """Which of this rank's things all others have too, as rank 0 orders them.

    Things of one signature belong together in their order, if every rank has as many of them.

    >>> pair([["a", "b"], ["b", "a"]], rank=1)
    [1, 0]
    >>> pair([["a", "a", "b"], ["a", "b"]], rank=0)
    [2]
    """
    counts = [Counter(each) for each in everyone]
    common = {sign for sign in counts[0] if all(each[sign] == counts[0][sign] for each in counts)}
    places = {
        sign: iter([index for index, each in enumerate(everyone[rank]) if each == sign])
        for sign in common
    }
    return [next(places[sign]) for sign in everyone[0] if sign in common]


def signature(value: Any) -> str:
    """What must be equal on all ranks for two things to be the same."""
    facts: list[Any]
    if isinstance(value, Optimizer):
        groups = [[_facts(each) for each in group["params"]] for group in value.param_groups]
        facts = [type(value).__name__, groups]
    elif not isinstance(value, DistributedDataParallel):
        facts = [type(value).__name__, str(getattr(value, "seed", ""))]
    else:
        parts = [*value.module.named_parameters(), *value.module.named_buffers()]
        facts = [type(value.module).__name__, [[name, *_facts(each)] for name, each in parts]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _facts(tensor: torch.Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype)]
