"""The result of a heal, and its duration."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from nbddp.formatting import format_bytes, format_number_ranges, format_ranks, list_some, plural
from nbddp.wire.frozen import Frozen
from nbddp.wire.request_messages import KEEPS_RANK, ON_ALL_RANKS

MAX_SHOWN_PLACES = 20  # paths in the report
MAX_SHOWN_VALUES = 100  # values in the report


def describe_disarmed(faults: Sequence[str]) -> str:
    """Say that new ranks do not have the faults that the old ones had.

    >>> describe_disarmed(["kill@rank=1,step=30"])
    'kill@rank=1,step=30 is disarmed, because its rank has ended; arm it again on the new rank'
    """
    if len(faults) == 1:
        return f"{faults[0]} is disarmed, because its rank has ended; arm it again on the new rank"
    named = " ".join(faults)
    return f"{named} are disarmed, because their ranks have ended; arm them again on the new ranks"


class HealFacts(Frozen):
    """The facts of a heal, for its report and its event.

    Attributes:
        ranks: the replaced ranks.
        donor: the rank from which they got their variables.
        names: number of variables.
        left: the reason for each name that could not be carried; only some of very many.
        more: number of other variables that could not be carried, under the key ``""``.
        places: paths at which a replacement put its own rank number instead of the donor's.
        own: values that replacements got from the dead ranks, not from the donor.
        unknown: values from the donor although those of the dead ranks differ or may differ.
        fork: seconds until the replacements were ready.
        carry: seconds from then until the donor had pickled the variables, too.
        meet: seconds until all ranks had joined the new process group.
    """

    ranks: tuple[int, ...]
    donor: int
    names: int
    left: Mapping[str, str]
    more: Mapping[str, int]
    places: tuple[str, ...]
    own: tuple[str, ...]
    unknown: tuple[str, ...]
    fork: float
    carry: float
    meet: float


class Healed(HealFacts):
    """The result of a heal.

    Attributes:
        cells: prompt number of the cell that made a name in ``left``, if known.
        size: number of carried bytes.
        disarmed: faults that were armed in the dead ranks.
    """

    cells: Mapping[str, int]
    size: int
    disarmed: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Total duration, from the request until the ranks were ready."""
        return self.fork + self.carry + self.meet

    @property
    def trainers(self) -> list[str]:
        """The trainers of other libraries, which no heal can carry."""
        return [name for name, why in self.left.items() if why == KEEPS_RANK]

    def __str__(self) -> str:
        """Return the report as text."""
        return "\n".join(self.lines())

    def lines(self, reruns: Collection[int] = ()) -> list[str]:
        """Return the result in one line, then lines for values and variables that differ.

        ``reruns``: the prompt numbers of the cells that run again after the heal.
        """
        lines = [
            f"{format_ranks(self.ranks)} healed with the variables of rank {self.donor} in "
            f"{self.seconds:.2f} s ({plural(self.names, 'variable')}, {format_bytes(self.size)})"
        ]
        if self.places:
            places = list_some(self.places, MAX_SHOWN_PLACES)
            lines.append(f"set to the new rank's own number: {places}")
        if self.own:
            have = "has its" if len(self.ranks) == 1 else "have their"
            values = list_some(self.own, MAX_SHOWN_VALUES)
            lines.append(f"{format_ranks(self.ranks)} {have} own values, not the donor's: {values}")
        if self.unknown:
            unknown = list_some(self.unknown, MAX_SHOWN_VALUES)
            lines.append(
                f"copied from rank {self.donor}, although {format_ranks(self.ranks)} had or may "
                f"have had other values: {unknown}; set them {self._on_which_ranks('')} if they "
                "must differ"
            )
        for name, why in self.left.items():
            lines.append(f"not carried: {name} ({why}){self._way_out(name, why, reruns)}")
        if more := sum(self.more.values()):
            lines.append(f"... and {more:,} more; make them again, {self._on_which_ranks('')}")
        if self.disarmed:
            lines.append(describe_disarmed(self.disarmed))
        return lines

    def _on_which_ranks(self, why: str) -> str:
        if why in ON_ALL_RANKS:
            return "on all ranks"
        return f"with --ranks {format_number_ranges(self.ranks)}"

    def _way_out(self, name: str, why: str, reruns: Collection[int]) -> str:
        ranks = self._on_which_ranks(why)
        cell = self.cells.get(name)
        if cell in reruns and why == KEEPS_RANK:
            return f"; cell [{cell}] makes it, and runs again now"
        if cell and why == KEEPS_RANK:
            return f"; cell [{cell}] makes it, on all ranks (`%ddp heal --rerun`)"
        if not name.isidentifier() or why == KEEPS_RANK:  # a part of a carried object
            return f"; make it again, {ranks}"
        return f"; a line of cell [{cell}] makes it: run that line again {ranks}" if cell else ""
