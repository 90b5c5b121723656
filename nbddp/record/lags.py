"""Which ranks are slower than the others, and not by chance. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot
from statistics import median_low

from nbddp.record.curves import Pace

MARGIN = 0.2  # by which a rank has to be slower; a busy machine makes one a tenth slower for long
SURE = 4.0  # standard errors: so far noise does not reach


@dataclass(frozen=True, slots=True)
class Lag:
    """By how much a rank is slower than the others.

    Attributes:
        share: of their time that the others wait for it, or, where they do not meet, by how much
            fewer steps it makes.
        seconds: the time in which that was seen.
        is_waited_for: which of the two.
    """

    share: float
    seconds: float
    is_waited_for: bool = True


def slower(paces: Mapping[int, Pace]) -> dict[int, Lag]:
    """The ranks that make fewer steps than most of those that report steps of the same loop."""
    found = {}
    for rank, pace in paces.items():
        others = [each for it, each in paces.items() if it != rank and each.loop == pace.loop]
        usual = median_low(each.per_second for each in others) if others else 0.0
        if usual <= 0:
            continue
        share = 1 - pace.per_second / usual
        error = hypot(pace.error, median_low(each.error for each in others))
        if share >= MARGIN and share > SURE * error:
            found[rank] = Lag(share, pace.seconds, is_waited_for=False)
    return found
