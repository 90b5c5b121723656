"""What else the ranks were asked, beside what a replay does: for an export."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbddp.errors import RequestError
from nbddp.export import Item, Omitted, PulledValue, PushedValues
from nbddp.record.cell import CellRequest, Deed
from nbddp.record.push_store import PushRecord

THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class _Entry:
    attempt: int
    position: int  # how much had been done before
    asked: CellRequest | PulledValue | Omitted


class Diary:
    """Notes what the ranks of each attempt were asked, but for what was pushed."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._faults: dict[int, str] = {}  # by prompt number: the line that armed one
        self.out: dict[int, str] = {}  # by prompt number: the notebook's name for a cell's values
        self.ports: set[int] = set()  # of stores that the notebook kept when it pushed something

    def note(
        self,
        asked: CellRequest | PulledValue | Omitted,
        *,
        attempt: int,
        position: int,
        fault: str = "",
        out: str = "",
    ) -> None:
        """Something was asked."""
        self._entries.append(_Entry(attempt, position, asked))
        if isinstance(asked, CellRequest):
            if fault:
                self._faults[asked.execution_count] = fault
            if out:
                self.out[asked.execution_count] = out

    def note_stores(self, names: Mapping[str, object]) -> None:
        """Something is pushed: it may tell the ranks of a store among the notebook's names."""
        if "torch.distributed" in sys.modules:
            from torch.distributed import TCPStore

            stores = [each for each in names.values() if isinstance(each, TCPStore)]
            self.ports |= {each.port for each in stores if each.host in THIS_MACHINE}

    def items(self, deeds: Sequence[Deed], *, attempt: int) -> list[Item]:
        """Return what an export is made of: what this attempt has done, and what was asked."""
        done = {each.execution_count for each in deeds if isinstance(each, CellRequest)}
        here = [each for each in self._entries if each.attempt == attempt]
        found: list[Item] = []
        for position in range(len(deeds) + 1):
            asked = (each.asked for each in here if each.position == position)
            found += [item for each in asked for item in self._beside(each, done)]
            if position < len(deeds):
                found.append(self._item(deeds[position]))
        return found

    def _beside(self, asked: CellRequest | PulledValue | Omitted, done: set[int]) -> Iterator[Item]:
        """Yield what has no place among what was done: a pull, and why a cell is left out."""
        if not isinstance(asked, CellRequest):
            yield asked
        elif asked.execution_count not in done:
            why = "it is marked --once" if asked.once else "it did not go well"
            yield self._omitted(asked) or Omitted(f"cell [{asked.execution_count}]", why)

    def _item(self, deed: Deed) -> Item:
        if isinstance(deed, PushRecord):
            return _pushed(deed)
        return self._omitted(deed) or deed

    def _omitted(self, request: CellRequest) -> Omitted | None:
        """Return what a cell is that has no place in a script although it went well."""
        if fault := self._faults.get(request.execution_count):
            return Omitted(fault, "a fault")
        if request.script is not None:
            return Omitted(request.source, "it is a script already")
        return None


def _pushed(deed: PushRecord) -> PushedValues | Omitted:
    what = f"the push of {', '.join(deed.names)}"
    try:
        values = pickle.loads(deed.data())  # made in this very process
    except RequestError as error:
        return Omitted(what, str(error))
    return PushedValues(values, deed.ranks)
