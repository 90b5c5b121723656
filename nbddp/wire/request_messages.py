"""Requests to an idle rank, and the answer to any of them.

The session numbers a request when it sends it; the answer has the same number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nbddp.wire.trace_messages import SendTrace

# reasons in a heal report for which all ranks must make the object again
MADE_BY_ALL = "a process group is made by all ranks at once"
KEEPS_RANK = "a trainer keeps its rank and its process group"


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Unpickle values and assign them to variables in the rank's namespace."""

    request: int = 0
    payload: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Evaluate an expression and send its value back."""

    request: int = 0
    expression: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """List the completions at a position in a piece of code."""

    request: int = 0
    code: str
    cursor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Describe the name at a position in a piece of code; ``detail`` 1 includes its source."""

    request: int = 0
    code: str
    cursor: int
    detail: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectFacts:
    """Describe all variables: a :class:`~nbddp.checks.facts.RankFacts`, as a dict."""

    request: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SendNamespace:
    """Pickle all variables except ``exclude``, for the replacements of dead ranks.

    ``replacements`` is empty if the user has chosen the donor.
    """

    request: int = 0
    exclude: list[str]
    replacements: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinGroup:
    """Form a new process group, in which replacements get the donor's variables.

    Attributes:
        request: number of the request.
        generation: number of the new process group.
        donor: the rank whose variables the replacements get.
        replacements: ranks with a new process.
        payload: reference to the pickled variables.
        storages: bytes and device type of each tensor's memory.
        own_values: for a replacement, by path, the texts of the donor's value and of its own value.
    """

    request: int = 0
    generation: int
    donor: int
    replacements: list[int]
    payload: dict[str, Any]
    storages: list[Any]
    own_values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a request.

    Attributes:
        request: number of the request.
        error: why the request failed; empty if it succeeded.
        payload: reference to a pickled value.
        content: JSON values.
    """

    request: int
    error: str = ""
    payload: dict[str, Any] = field(default_factory=dict)
    content: dict[str, Any] = field(default_factory=dict)


Request = Push | Pull | Complete | Inspect | SendNamespace | JoinGroup | CollectFacts | SendTrace
