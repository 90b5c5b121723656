"""Requests to an idle rank, and the answer to any of them.

The answer has the number of its request.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from nbddp.wire.frozen import Frozen
from nbddp.wire.trace_messages import SendTrace

# reasons in a heal report for which all ranks must make the object again
MADE_BY_ALL = "a process group is made by all ranks at once"
KEEPS_RANK = "a trainer keeps its rank and its process group"
LOST_PART = "a part of it died with its rank"
ON_ALL_RANKS = (MADE_BY_ALL, KEEPS_RANK, LOST_PART)


class RankRequest(Frozen):
    """A request to a rank; the session numbers it when it sends it."""

    request: int = 0


class Push(RankRequest):
    """Unpickle values and assign them to variables in the rank's namespace."""

    payload: dict[str, Any]


class Pull(RankRequest):
    """Evaluate an expression and send its value back."""

    expression: str


class Complete(RankRequest):
    """List the completions at a position in a piece of code."""

    code: str
    cursor: int


class Inspect(RankRequest):
    """Describe the name at a position in a piece of code; ``detail`` 1 includes its source."""

    code: str
    cursor: int
    detail: int = 0


class CollectFacts(RankRequest):
    """Describe all variables: a :class:`~nbddp.checks.facts.RankFacts`, as a dict."""


class SendNamespace(RankRequest):
    """Pickle all variables except ``exclude``, for the replacements of dead ranks.

    ``checks``: the rank first checks whether its variables can replace those of the dead ranks.
    """

    exclude: list[str]
    replacements: list[int]
    checks: bool = True


class JoinGroup(RankRequest):
    """Form a new process group, in which replacements get the donor's variables.

    Attributes:
        generation: number of the new process group.
        donor: the rank whose variables the replacements get.
        replacements: ranks with a new process.
        payload: reference to the pickled variables.
        storages: bytes and device type of each tensor's memory.
        shards: from where replacements get their shards of models: "replicas" or "copies"; empty if
            there are no sharded models.
        own_values: for a replacement, by path, the texts of the donor's value and of its own value.
    """

    generation: int
    donor: int
    replacements: list[int]
    payload: dict[str, Any]
    storages: list[Any]
    shards: str = ""
    own_values: dict[str, Any] = field(default_factory=dict)


class Answer(Frozen):
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
