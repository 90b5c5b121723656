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
        done: what went well.
        undone: what a replay that ended too early did not come to; another replay does it, until
            something else is done.
    """

    def __init__(self) -> None:
        self.done: tuple[ReplayEntry, ...] = ()
        self.undone: tuple[ReplayEntry, ...] = ()

    def note_cell(self, cell: CellHandle, verdict: Verdict | None) -> None:
        """A cell has ended."""
        if verdict is None and not cell.request.once:
            self.note(cell.deed())

    def note(self, deed: ReplayEntry) -> None:
        """Something was done."""
        self.done += (deed,)
        self.undone = ()

    def leave(self, undone: Sequence[ReplayEntry], *, is_all: bool = False) -> None:
        """A replay has ended before all was done; ``is_all``: nothing was."""
        self.done = () if is_all else self.done
        self.undone = tuple(undone)

    def forget(self) -> None:
        """The namespaces are empty again.

        Where nothing was done on the ranks before, the next cell starts others, and may want names
        that they do not have: a replay still has them to make.
        """
        self.undone = () if self.done else self.undone
        self.done = ()


def assigned_names(source: str) -> set[str]:
    """The names that source binds outside its functions.

    >>> sorted(assigned_names("import os.path; x = [i for i in range(2)]; (z := 1)"))
    ['os', 'x', 'z']
    """
    top = symtable.symtable(source, "cell", "exec")
    return {
        each.get_name()
        for each in top.get_symbols()
        if each.is_assigned() or each.is_imported() or each.is_namespace()
    }


def cell_that_assigned(name: str, deeds: Sequence[ReplayEntry]) -> int:
    """The prompt's number of the last cell that bound a name; 0 if none is known.

    >>> cells = [CellRequest(source="lock = 1", execution_count=4), CellRequest(source="!ls")]
    >>> cell_that_assigned("lock", cells), cell_that_assigned("x", cells)
    (4, 0)
    """
    for deed in reversed(deeds):
        if isinstance(deed, CellRequest) and _binds(deed.source, name):
            return deed.execution_count
    return 0


def _binds(source: str, name: str) -> bool:
    try:
        return name in assigned_names(source)
    except SyntaxError:  # it has a magic in it
        return False


def describe_entries(deeds: Sequence[ReplayEntry]) -> str:
    """Name some deeds in a few words: cells by the numbers of their prompts.

    >>> cells = [CellRequest(source="", execution_count=number) for number in (2, 3, 5)]
    >>> describe_entries([*cells, PushRecord(("x", "y"), None, None)])
    'cells 2-3,5, the push of x, y'
    >>> describe_entries([CellRequest(source="") for _ in range(3)]), describe_entries([])
    ('3 cells', 'nothing')
    >>> describe_entries([*cells, CellRequest(source="nbddp.faults.at(step=3)  # %ddp fault kill")])
    'cells 2-3,5, 1 armed fault'
    """
    cells = [deed for deed in deeds if isinstance(deed, CellRequest)]
    faults = [cell for cell in cells if FAULT.fullmatch(cell.source)]
    numbers = [cell.execution_count for cell in cells if cell not in faults]
    names = [name for deed in deeds if isinstance(deed, PushRecord) for name in deed.names]
    words = []
    if len(numbers) > len(set(numbers)):  # one cell of a notebook ran several
        words.append(plural(len(numbers), "cell"))
    elif numbers:
        words.append(f"cell{'s' if len(numbers) > 1 else ''} {format_number_ranges(numbers)}")
    if faults:
        words.append(plural(len(faults), "armed fault"))
    if names:
        words.append(f"the push of {', '.join(dict.fromkeys(names))}")
    return ", ".join(words) or "nothing"
