"""Requests to an idle rank, and the answer to any of them.

The answer has the number of its request.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from nbddp.wire.frozen import Frozen

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
    """Let the halves of extensions describe all variables; the answer has their facts by name."""


class PickleNamespace(RankRequest):
    """Pickle all variables except ``exclude``, for the replacements of dead ranks.

    The rank answers with a :class:`PickledNames`.

    ``checks``: the rank first checks whether its variables can replace those of the dead ranks.
    """

    exclude: dict[str, str]
    replacements: list[int]
    checks: bool = True


class JoinGroup(RankRequest):
    """Form a new process group, in which replacements get the donor's variables.

    The rank answers with a :class:`JoinedGroup`.

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


class ExtensionMessage(RankRequest):
    """A message of an extension, which its half at the other end handles.

    Attributes:
        extension: its name.
        content: JSON values.
    """

    extension: str
    content: dict[str, Any]


class PickledNames(Frozen):
    """The variables that a donor has pickled for the replacements.

    Attributes:
        payload: reference to the pickled variables.
        size: bytes of the pickle.
        names: the pickled variables.
        not_pickled: why a variable or a part of one could not be pickled; only some of very many.
        more: number of the others that could not be pickled.
        storages: bytes and device type of each tensor's memory, which is not in the pickle.
        shards: as in :class:`JoinGroup`.
    """

    payload: dict[str, Any]
    size: int
    names: list[str]
    not_pickled: dict[str, str]
    more: int
    storages: list[list[Any]]
    shards: str


class JoinedGroup(Frozen):
    """How a rank has joined the process group of a heal, or why it could not.

    Attributes:
        is_consequence: whether it could not join only because another rank did not.
        is_refused: whether another heal would fail in the same way.
        not_loaded: by name, why this replacement could not load a variable.
        places: paths at which this replacement put its own rank number.
        own_values: paths at which it put its own value.
        differing: paths at which it has the donor's value, although its own one was another.
    """

    is_consequence: bool = False
    is_refused: bool = False
    not_loaded: dict[str, str] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)
    own_values: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)


class Answer(Frozen):
    """The answer to a request.

    Attributes:
        request: number of the request.
        error: why the request failed; empty if it succeeded.
        payload: reference to a pickled value.
        content: JSON values, such as the fields of a :class:`PickledNames`.
    """

    request: int
    error: str = ""
    payload: dict[str, Any] = field(default_factory=dict)
    content: dict[str, Any] = field(default_factory=dict)


Request = (
    Push | Pull | Complete | Inspect | PickleNamespace | JoinGroup | CollectFacts | ExtensionMessage
)
