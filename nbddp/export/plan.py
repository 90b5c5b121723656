"""What a script is made of, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbddp.record.cell import CellRequest


@dataclass(frozen=True, slots=True)
class Sent:
    """Values that were pushed, to these ranks or to all."""

    values: Mapping[str, Any]
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Pulled:
    """What the notebook fetched: the script prints it."""

    expression: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Left:
    """What has no place in a script, and why."""

    what: str
    reason: str


Item = CellRequest | Sent | Pulled | Left


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a script is made of.

    Attributes:
        items: in their order.
        nproc: ranks on a machine.
        backend: as torch calls it; ``auto`` for nccl where each rank has a GPU.
        timeout: of collectives, in seconds; 0 for torch's own.
        threads: of torch's operators in each rank.
        out: by a cell's prompt number, the name that its values have in the notebook.
        above: by a cell's prompt number, what the notebook says above it, in Markdown.
        ports: of stores that the notebook kept when it pushed something.
        is_plain: whether to say what stands for nbddp's own functions.
    """

    items: Sequence[Item]
    nproc: int
    backend: str = "auto"
    timeout: float = 0.0
    threads: int = 1
    out: Mapping[int, str] = field(default_factory=dict)
    above: Mapping[int, str] = field(default_factory=dict)
    ports: frozenset[int] = frozenset()
    is_plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A script.

    Attributes:
        text: of the file.
        pickled: what lies in a file beside it, empty if nothing does.
        command: the line that runs it.
        remarks: what the user should know: names that nobody defines, what was left out.
    """

    text: str
    pickled: bytes
    command: str
    remarks: tuple[str, ...]
