"""A collective, as ranks report it."""

from __future__ import annotations

from typing import NamedTuple


class Collective(NamedTuple):
    """One collective of one group.

    Attributes:
        name: name of the function.
        number: its number in the group; 0 if it is not known.
        group: the group's ranks, as ``[0, 2]``; empty for the default group.
        shape: dtype and sizes of the input, as ``float [72]``.

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
        """Name, number and group."""
        number = f"#{self.number}" if self.number else ""
        return " ".join(filter(None, (self.name, number, self._of_group)))

    @property
    def position(self) -> tuple[str, int]:
        """The group and the collective's number in it."""
        return self.group, self.number

    @property
    def kind(self) -> str:
        """Name, shape and group, without the number."""
        return " ".join(filter(None, (self.name, self.shape, self._of_group)))

    @property
    def _of_group(self) -> str:
        return f"of group {self.group}" if self.group else ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.title, self.shape)))
