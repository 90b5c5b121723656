"""What a rank answers to ``%ddp memory`` and ``%ddp free``."""

from __future__ import annotations

from dataclasses import field

from nbddp.wire.frozen import Frozen
from nbddp.wire.messages import JsonDict

PROCESS, GPU = "process", "GPU"  # the places of memory
OTHER = "tensors without a name"  # the kind of what only other Python objects hold


class Used(Frozen):
    """The memory that a rank uses at one place, in bytes.

    Attributes:
        total: of the process, its resident set size (RSS); of the GPUs, what torch has reserved.
        shared: what other processes use, too.
        share: RSS, but shared memory is divided among its processes (PSS); 0 if unknown.
        tensors: on the GPUs, what tensors use.
    """

    total: int = 0
    shared: int = 0
    share: int = 0
    tensors: int = 0


class MemoryAnswer(Frozen):
    """Who holds the memory of a rank.

    Attributes:
        used: what it uses, by place.
        before: what it used before it gave memory back.
        holders: rows of ``[place, name, kind, bytes]``.
    """

    used: dict[str, Used]
    before: dict[str, Used] = field(default_factory=dict)
    holders: list[tuple[str, str, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:  # JSON has dicts
        for name in ("used", "before"):
            values: JsonDict = getattr(self, name)
            made = {at: Used(**v) if isinstance(v, dict) else v for at, v in values.items()}
            object.__setattr__(self, name, made)
