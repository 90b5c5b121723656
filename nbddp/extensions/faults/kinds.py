"""The kinds of faults and the class of a fault; imports no torch, so a notebook can list them."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from difflib import get_close_matches

from nbddp.errors import ArgumentError
from nbddp.extensions.faults import FACTOR, MEANINGS

KINDS = tuple(MEANINGS)
FAULTS_VARIABLE = "NBDDP_FAULTS"  # the variable by which the ranks of a script get armed faults
_FLOAT = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"
SPELLING = re.compile(rf"(\w*)@rank=(-?\d+),step=(-?\d+)(?:,factor=({_FLOAT}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: its kind, rank and step.

    Args:
        kind: one of ``KINDS``.
        rank: the rank on which it fires.
        step: the first step at which it may fire.
        factor: the factor by which later steps take longer; for ``slow`` only.

    Raises:
        ArgumentError: the kind, rank, step or factor is invalid.
        TypeError: rank or step is not a whole number, or factor is not a number.

    >>> str(Fault(kind="kill", rank=1, step=30))
    'kill@rank=1,step=30'
    >>> Fault.parse("slow@rank=0,step=5,factor=3").factor
    3.0
    """

    kind: str
    rank: int
    step: int
    factor: float = FACTOR

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            near = get_close_matches(self.kind.lower(), KINDS, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise ArgumentError(
                f"there is no fault {self.kind!r}{meant} (kinds: {', '.join(KINDS)})"
            )
        for name in ("rank", "step"):
            number = operator.index(getattr(self, name))
            if number < 0:
                raise ArgumentError(f"{name} must be 0 or more, got {number}")
            object.__setattr__(self, name, number)
        object.__setattr__(self, "factor", float(self.factor))
        if self.kind != "slow" and self.factor != FACTOR:
            raise ArgumentError(f"factor is for a fault of kind 'slow', not for {self.kind!r}")
        if not 1 < self.factor < math.inf:
            raise ArgumentError(f"factor must be a number above 1, got {self.factor:g}")

    def __str__(self) -> str:
        factor = f",factor={self.factor!r}".removesuffix(".0") if self.kind == "slow" else ""
        return f"{self.kind}@rank={self.rank},step={self.step}{factor}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse a fault in the format of ``str()``.

        Raises:
            ArgumentError: the format is wrong; the message shows the correct one.

        >>> Fault.parse("kil@rank=1,step=30")
        Traceback (most recent call last):
        nbddp.errors.ArgumentError: there is no fault 'kil'; did you mean 'kill'? (kinds: raise, \
kill, segfault, exit, hang, stop, slow, nan, skip, oom, corrupt)
        """
        found = SPELLING.fullmatch("".join(text.split()))
        if found is None:
            raise ArgumentError(
                f"cannot read fault {text!r}; write it like 'kill@rank=1,step=30' or "
                f"'slow@rank=1,step=30,factor=3' (kinds: {', '.join(KINDS)})"
            )
        kind, rank, step, factor = found.groups()
        return cls(kind=kind, rank=int(rank), step=int(step), factor=float(factor or FACTOR))
