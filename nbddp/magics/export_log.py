"""What an export needs and the replay log does not have: pulls, and what is left out."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from operator import itemgetter

from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.export.script import Item, Omitted, PulledValue, PushedValues
from nbddp.record.cell import CellRequest, CellResult, ReplayEntry
from nbddp.record.push_store import PushRecord
from nbddp.record.replay_log import FAULT

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


class ExportLog:
    """Notes for an export; they are valid in the attempt in which they were made."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._items: list[tuple[int, int, Item]] = []  # with the attempt and the entries before
        self.output_names: dict[
            int, str
        ] = {}  # by prompt number: the notebook's name for a cell's values
        self.store_ports: set[int] = (
            set()
        )  # of stores that the notebook kept when it pushed something

    def add(self, item: PulledValue | Omitted) -> None:
        """Note what the replay log does not have."""
        self._items.append((self._session.life.attempt, len(self._session.completed_entries), item))

    def record_store_ports(self, names: Mapping[str, object]) -> None:
        """Something is pushed: it may tell the ranks of a store among the notebook's names."""
        if "torch.distributed" in sys.modules:
            from torch.distributed import TCPStore

            stores = [each for each in names.values() if isinstance(each, TCPStore)]
            self.store_ports |= {each.port for each in stores if each.host in LOOPBACK_HOSTS}

    def items(self) -> list[Item]:
        """Return what an export is made of: what this attempt has done, and what was noted."""
        attempt, entries = self._session.life.attempt, self._session.completed_entries
        noted = [(position, item) for at, position, item in self._items if at == attempt]
        done = [(position, _export_item(entry)) for position, entry in enumerate(entries)]
        return [item for _, item in sorted([*noted, *done], key=itemgetter(0))]


def omitted_cell(request: CellRequest, result: CellResult) -> Omitted | None:
    """Return why a cell is not in the replay log; None if it is."""
    what = f"cell [{request.execution_count}]"
    if request.once:
        reason = "it is marked --once"
        return _omitted_script(request) if request.script else Omitted(what, reason, request.source)
    return None if result.is_ok else Omitted(what, "it failed", request.source)


def _omitted_script(request: CellRequest) -> Omitted:
    return Omitted(request.source, "it is a script already")


def _export_item(entry: ReplayEntry) -> Item:
    if isinstance(entry, PushRecord):
        try:
            values = pickle.loads(entry.data())  # made in this very process
            return PushedValues(values, entry.ranks)
        except RequestError as error:
            return Omitted(f"the push of {', '.join(entry.names)}", str(error))
    if fault := FAULT.fullmatch(entry.source):
        return Omitted(fault[1], "a fault")
    return entry if entry.script is None else _omitted_script(entry)
