"""What was done to the ranks' namespaces, to do it again: cells that went well, values pushed."""

from __future__ import annotations

import re
import symtable
from collections.abc import Sequence

from nbddp.errors import format_number_ranges
from nbddp.formatting import plural
from nbddp.record.cell import CellHandle, CellRequest, ReplayEntry
from nbddp.record.push_store import PushRecord
from nbddp.record.verdict import Verdict

SET_IN_EACH_RANK = frozenset(
    {"rank", "local_rank", "world_size", "device", "torch", "dist", "nbddp"}
)
FAULT = re.compile(r"nbddp\.faults\.at\(.*\)  # (%ddp fault .*)")  # as Desk.arm writes it


class ReplayLog:
    """What was done on one attempt, in order, and what a replay has left to do.

    Attributes:
        entries: what went well.
        pending: what a replay that ended too early did not come to; another replay does it, until
            something else is done.
    """

    def __init__(self) -> None:
        self.entries: tuple[ReplayEntry, ...] = ()
        self.pending: tuple[ReplayEntry, ...] = ()

    def add_cell(self, cell: CellHandle, verdict: Verdict | None) -> None:
        """A cell has ended."""
        if verdict is None and not cell.request.once:
            self.add(cell.replay_entry())

    def add(self, entry: ReplayEntry) -> None:
        """Something was done."""
        self.entries += (entry,)
        self.pending = ()

    def set_pending(self, pending: Sequence[ReplayEntry], *, clears_entries: bool = False) -> None:
        """A replay has ended before all was done; ``clears_entries``: nothing was."""
        self.entries = () if clears_entries else self.entries
        self.pending = tuple(pending)

    def clear(self) -> None:
        """The namespaces are empty again.

        Where nothing was done on the ranks before, the next cell starts others, and may want names
        that they do not have: a replay still has them to make.
        """
        self.pending = () if self.entries else self.pending
        self.entries = ()


def assigned_names(source: str) -> set[str]:
    """The names that source binds outside its functions.

    >>> sorted(assigned_names("import os.path; x = [i for i in range(2)]; (z := 1)"))
    ['os', 'x', 'z']
    """
    top = symtable.symtable(source, "cell", "exec")
    return {
        symbol.get_name()
        for symbol in top.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }


def cell_that_assigned(name: str, entries: Sequence[ReplayEntry]) -> int:
    """The prompt's number of the last cell that bound a name; 0 if none is known.

    >>> cells = [CellRequest(source="lock = 1", execution_count=4), CellRequest(source="!ls")]
    >>> cell_that_assigned("lock", cells), cell_that_assigned("x", cells)
    (4, 0)
    """
    for entry in reversed(entries):
        if isinstance(entry, CellRequest) and _assigns(entry.source, name):
            return entry.execution_count
    return 0


def _assigns(source: str, name: str) -> bool:
    try:
        return name in assigned_names(source)
    except SyntaxError:  # it has a magic in it
        return False


def describe_entries(entries: Sequence[ReplayEntry]) -> str:
    """Name some deeds in a few words: cells by the numbers of their prompts.

    >>> cells = [CellRequest(source="", execution_count=number) for number in (2, 3, 5)]
    >>> describe_entries([*cells, PushRecord(("x", "y"), None, None)])
    'cells 2-3,5, the push of x, y'
    >>> describe_entries([CellRequest(source="") for _ in range(3)]), describe_entries([])
    ('3 cells', 'nothing')
    >>> describe_entries([*cells, CellRequest(source="nbddp.faults.at(step=3)  # %ddp fault kill")])
    'cells 2-3,5, 1 armed fault'
    """
    cells = [entry for entry in entries if isinstance(entry, CellRequest)]
    faults = [cell for cell in cells if FAULT.fullmatch(cell.source)]
    numbers = [cell.execution_count for cell in cells if cell not in faults]
    names = [name for entry in entries if isinstance(entry, PushRecord) for name in entry.names]
    parts = []
    if len(numbers) > len(set(numbers)):  # one cell of a notebook ran several
        parts.append(plural(len(numbers), "cell"))
    elif numbers:
        parts.append(f"cell{'s' if len(numbers) > 1 else ''} {format_number_ranges(numbers)}")
    if faults:
        parts.append(plural(len(faults), "armed fault"))
    if names:
        parts.append(f"the push of {', '.join(dict.fromkeys(names))}")
    return ", ".join(parts) or "nothing"
