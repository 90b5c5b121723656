"""Requests to an idle rank, and the answer to any of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nbddp.wire.trace_messages import SendTrace

JsonDict = dict[str, Any]
MADE_BY_ALL = "a process group is made by all ranks at once"  # why it is not carried


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Put pickled values into the rank's namespace."""

    request: int
    payload: JsonDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Evaluate a name or an expression and send its value back."""

    request: int
    expression: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Say which names fit at this place of this code."""

    request: int
    code: str
    cursor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Say what the name at this place of this code is; ``detail`` 1 for its source too."""

    request: int
    code: str
    cursor: int
    detail: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectFacts:
    """Say what is known of all names: a :class:`~nbddp.checks.facts.RankFacts`, as a dict."""

    request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendNamespace:
    """Lay all names out for ranks that take dead ones' places, but those to ``exclude``.

    ``replacements`` are none where the user has chosen whose names they get.
    """

    request: int
    exclude: list[str]
    replacements: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinGroup:
    """Form a new process group, in which replacements get the names that a donor gave.

    ``payload``: the names; ``storages``: bytes and kind of device of each tensor's memory.
    ``own_values``: for a replacement, by path, the marks of the donor's value and of its own value.
    """

    request: int
    generation: int
    donor: int
    replacements: list[int]
    payload: dict[str, Any]
    storages: list[Any]
    own_values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a rank says to what it was asked; ``error`` is empty when it worked."""

    request: int
    error: str = ""
    payload: JsonDict = field(default_factory=dict)
    content: JsonDict = field(default_factory=dict)


Request = Push | Pull | Complete | Inspect | SendNamespace | JoinGroup | CollectFacts | SendTrace
