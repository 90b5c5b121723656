"""What ranks are told while a group heals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MADE_BY_ALL = "a process group is made by all ranks at once"  # why it is not carried


@dataclass(frozen=True, slots=True, kw_only=True)
class SendNamespace:
    """Lay all names out for ranks that take dead ones' places, but those to ``leave``.

    ``replacements`` are none where the user has chosen whose names they get.
    """

    request: int
    leave: list[str]
    replacements: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinGroup:
    """Form a new process group, in which replacements get the names that a donor gave.

    ``parcel``: the names; ``storages``: of their tensors' memory, bytes and kind of device of each.
    ``own``: for a replacement, by path, the marks of the donor's value and of its own value.
    """

    request: int
    generation: int
    donor: int
    replacements: list[int]
    parcel: dict[str, Any]
    storages: list[Any]
    own: dict[str, Any] = field(default_factory=dict)
