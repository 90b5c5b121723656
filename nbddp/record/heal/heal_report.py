"""What came of healing a worker group, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbddp.errors import format_ranks
from nbddp.formatting import format_bytes
from nbddp.wire.request_messages import MADE_BY_ALL

MAX_SHOWN_PLACES = 20  # of those that got another number
MAX_SHOWN_VALUES = 100  # of those that a rank has again, or that the user must set


@dataclass(frozen=True, slots=True, kw_only=True)
class Healed:
    """What healing has done, and cost.

    Attributes:
        ranks: those that are new.
        donor: the one whose names they have.
        names: how many.
        left: why not, for each name that could not be carried; of very many for some.
        more: how many others could not be carried, under ``""``.
        places: where a new rank put its own number in the place of the donor's.
        own: values that new ranks have from the dead ranks, not from the donor.
        unknown: values that they have from the donor although those of the dead ranks differ or
            may differ.
        cells: the prompt's number of the cell that made such a name, where it is known.
        size: bytes that were carried.
        fork: seconds until the new ranks were there.
        carry: seconds that packing the names took.
        meet: seconds until all ranks had met.
    """

    ranks: tuple[int, ...]
    donor: int
    names: int
    left: Mapping[str, str]
    more: Mapping[str, int]
    places: tuple[str, ...]
    cells: Mapping[str, int]
    size: int
    fork: float
    carry: float
    meet: float
    own: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """From when it was asked for until the ranks were ready."""
        return self.fork + self.carry + self.meet

    def __str__(self) -> str:
        """In a line, and one for each name that did not come."""
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """What was done, and then each name that did not come."""
        lines = [
            f"{format_ranks(self.ranks)} healed with the names of rank {self.donor} in "
            f"{self.seconds:.2f} s ({self.names} names, {format_bytes(self.size)})"
        ]
        if self.places:
            lines.append(f"set to the new rank's own number: {_join_few(self.places)}")
        if self.own:
            have = "has its" if len(self.ranks) == 1 else "have their"
            own = _join_few(self.own, MAX_SHOWN_VALUES)
            lines.append(f"{format_ranks(self.ranks)} {have} own values, not the donor's: {own}")
        if self.unknown:
            unknown = _join_few(self.unknown, MAX_SHOWN_VALUES)
            lines.append(
                f"copied from rank {self.donor}, although {format_ranks(self.ranks)} had or may "
                f"have had other values: {unknown}; set them {self._where('')} if they must differ"
            )
        for name, why in self.left.items():
            lines.append(f"not carried: {name} ({why}){self._way_out(name, why)}")
        if more := sum(self.more.values()):
            lines.append(f"... and {more:,} more; make them again, {self._where('')}")
        return lines

    def _where(self, why: str) -> str:
        if why == MADE_BY_ALL:
            return "on all ranks"
        return "with --ranks " + ",".join(map(str, self.ranks))

    def _way_out(self, name: str, why: str) -> str:
        ranks = self._where(why)
        if not name.isidentifier():  # a part of what came
            return f"; make it again, {ranks}"
        if not self.cells.get(name):
            return ""
        return f"; cell [{self.cells[name]}] makes it: run that line {ranks}"


def _join_few(paths: Sequence[str], most: int = MAX_SHOWN_PLACES) -> str:
    more = len(paths) - most
    rest = [f"{more:,} more"] if more > 0 else []
    return ", ".join([*paths[:most], *rest])
