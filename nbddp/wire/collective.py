"""A collective, as ranks report it."""

from __future__ import annotations

from typing import NamedTuple


class Collective(NamedTuple):
    """One collective of one group.

    Attributes:
        name: the function.
        number: which one of its group it is; 0 where that is not known.
        group: the group's ranks, as ``[0, 2]``; empty for the default group.
        shape: dtype and sizes of what goes in, as ``float [72]``.

    >>> call = Collective("all_reduce", 3, "[0, 2]", "float [72]")
    >>> call.title, call.kind
    ('all_reduce #3 of group [0, 2]', 'all_reduce float [72] of group [0, 2]')
    """

    name: str
    number: int = 0
    group: str = ""
    shape: str = ""

    @property
    def title(self) -> str:
        """Which one it is."""
        number = f"#{self.number}" if self.number else ""
        return " ".join(filter(None, (self.name, number, self._of_group)))

    @property
    def position(self) -> tuple[str, int]:
        """The group, and which one of its collectives."""
        return self.group, self.number

    @property
    def kind(self) -> str:
        """What kind of collective it is."""
        return " ".join(filter(None, (self.name, self.shape, self._of_group)))

    @property
    def _of_group(self) -> str:
        return f"of group {self.group}" if self.group else ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.title, self.shape)))
