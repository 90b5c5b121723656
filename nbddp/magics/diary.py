"""What the ranks were asked, in its order: an export says what it leaves out, and where."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbddp.errors import RequestError
from nbddp.export import Item, Left, Pulled, Sent
from nbddp.record.cell import CellRequest, Deed
from nbddp.record.pushes import Pushed

Asked = CellRequest | Pulled | Left
THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class _Entry:
    attempt: int
    asked: Asked
    fault: str = ""  # the line that armed it, if that is what the cell was for


class Diary:
    """Notes what the ranks of each attempt were asked, but for what was pushed."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self.out: dict[int, str] = {}  # by prompt number: the notebook's name for a cell's values
        self.ports: set[int] = set()  # of stores that the notebook kept when it pushed something

    def note(self, asked: Asked, *, attempt: int, fault: str = "", out: str = "") -> None:
        """Something was asked."""
        self._entries.append(_Entry(attempt, asked, fault))
        if out and isinstance(asked, CellRequest):
            self.out[asked.execution_count] = out

    def note_stores(self, names: Mapping[str, object]) -> None:
        """Something is pushed: it may tell the ranks of a store among the notebook's names."""
        if "torch.distributed" in sys.modules:
            from torch.distributed import TCPStore

            stores = [each for each in names.values() if isinstance(each, TCPStore)]
            self.ports |= {each.port for each in stores if each.host in THIS_MACHINE}

    def items(self, deeds: Sequence[Deed], *, attempt: int) -> list[Item]:
        """What an export is made of: what was done, and between it what is left out.

        Args:
            deeds: what this attempt has done.
            attempt: which one it is.
        """
        found: list[Item] = []
        begin = 0
        for deed in deeds:
            if isinstance(deed, Pushed):
                found.append(_sent(deed))
                continue
            at, fault = self._position(deed, begin), ""
            if at is not None:
                found += self._between(begin, at, attempt)
                begin, fault = at + 1, self._entries[at].fault
            found.append(_left(deed, fault) or deed)
        return found + list(self._between(begin, len(self._entries), attempt))

    def _position(self, deed: CellRequest, begin: int) -> int | None:
        """Where it was asked for, from there on; None where it was done again, as in a replay."""
        for at in range(begin, len(self._entries)):
            asked = self._entries[at].asked
            if isinstance(asked, CellRequest) and _is_same(asked, deed):
                return at
        return None

    def _between(self, begin: int, end: int, attempt: int) -> Iterator[Item]:
        for entry in self._entries[begin:end]:
            if entry.attempt != attempt:
                continue
            if isinstance(entry.asked, CellRequest):
                why = "it is marked --once" if entry.asked.once else "it did not go well"
                yield _left(entry.asked, entry.fault) or Left(_named(entry.asked), why)
            else:
                yield entry.asked


def _is_same(one: CellRequest, other: CellRequest) -> bool:
    return (one.source, one.execution_count, one.ranks) == (
        other.source,
        other.execution_count,
        other.ranks,
    )


def _named(request: CellRequest) -> str:
    return f"cell [{request.execution_count}]"


def _left(request: CellRequest, fault: str) -> Left | None:
    """What a cell is that has no place in a script although it went well; None if it has one."""
    if fault:
        return Left(fault, "a fault")
    if request.script is not None:
        return Left(request.source, "it is a script already")
    return None


def _sent(pushed: Pushed) -> Sent | Left:
    what = f"the push of {', '.join(pushed.names)}"
    try:
        values = pickle.loads(pushed.data())  # made in this very process
    except RequestError as error:
        return Left(what, str(error))
    return Sent(values, pushed.ranks)
