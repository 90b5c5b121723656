"""The items of an export that are not in the replay log: pulls, and omitted cells."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from operator import itemgetter

from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.extensions.export.script import Item, Omitted, PulledValue, PushedValues
from nbddp.record.cell import CellRequest, ReplayEntry
from nbddp.record.push_store import PushRecord

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


class ExportLog:
    """Collects items for an export. They are valid for the attempt in which they were added."""

    def __init__(self, session: Session) -> None:
        self._session = session
        # each with its attempt and the number of replay entries at that time
        self._items: list[tuple[int, int, Item]] = []
        # of the stores that the notebook had when it pushed something
        self.store_ports: set[int] = set()

    def add(self, item: PulledValue | Omitted) -> None:
        """Add an item that is not in the replay log."""
        entries = self._session.replay_log.all_entries
        self._items.append((self._session.life.attempt, len(entries), item))

    def record_store_ports(self, names: Mapping[str, object]) -> None:
        """Record the ports of the notebook's stores: a pushed value may tell them to the ranks."""
        if "torch.distributed" in sys.modules:
            from torch.distributed import TCPStore

            stores = [each for each in names.values() if isinstance(each, TCPStore)]
            self.store_ports |= {each.port for each in stores if each.host in LOOPBACK_HOSTS}

    def items(self) -> list[Item]:
        """Return the items of an export in order, the replay log of this attempt included."""
        attempt, entries = self._session.life.attempt, self._session.replay_log.all_entries
        noted = [(position, item) for at, position, item in self._items if at == attempt]
        done = [(position, _export_item(entry)) for position, entry in enumerate(entries)]
        return [item for _, item in sorted([*noted, *done], key=itemgetter(0))]


def omitted_cell(request: CellRequest, reason: str) -> Omitted:
    """Return the item of a cell or script that is not in the replay log."""
    if request.once and request.script:
        return _omitted_script(request)
    return Omitted(f"cell [{request.execution_count}]", reason, request.source)


def _omitted_script(request: CellRequest) -> Omitted:
    return Omitted(request.source, "it is already a script")


def _export_item(entry: ReplayEntry) -> Item:
    if isinstance(entry, PushRecord):
        try:
            values = pickle.loads(entry.data())  # this process pickled them
            return PushedValues(values, entry.ranks)
        except RequestError as error:
            return Omitted(f"the push of {', '.join(entry.names)}", str(error))
    if entry.command:
        return Omitted(f"%ddp {entry.command}", f"a {entry.command.partition(' ')[0]}")
    return entry if entry.script is None else _omitted_script(entry)
