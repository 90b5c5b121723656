"""The cells and pushes that made the namespaces of the ranks, in order, for a replay."""

from __future__ import annotations

import ast
import dis
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from types import CodeType

from nbddp.formatting import format_number_ranges, plural
from nbddp.record.cell import CellRequest, ReplayEntry
from nbddp.record.push_store import PushRecord
from nbddp.wire.request_messages import ON_ALL_RANKS

SET_IN_EACH_RANK = frozenset(
    {"rank", "local_rank", "world_size", "device", "torch", "dist", "nbddp"}
)
STORES = frozenset({"STORE_NAME", "STORE_GLOBAL"})  # bytecode that binds a name of a cell


class ReplayLog:
    """The replay log of one attempt, and the entries that a replay has not run.

    Attributes:
        entries: cells that succeeded, and pushes.
        pending: entries that an incomplete replay did not run. The next replay runs them, unless
            the user repeats them before.
        lost: the variables of earlier attempts that this one does not have, each with the prompt
            number of the cell that set it; 0 if it was pushed, or the cell has no number.
        is_rejoined: whether another notebook may have run cells in this attempt.
        not_carried: the reason for each name or path that a heal could not carry, and that no later
            entry has set.
    """

    def __init__(self) -> None:
        self.entries: tuple[ReplayEntry, ...] = ()
        self.pending: tuple[ReplayEntry, ...] = ()
        self._pending_at = 0  # number of entries that precede the pending ones
        self.lost: dict[str, int] = {}
        self.is_rejoined = False
        self.not_carried: dict[str, str] = {}

    @property
    def all_entries(self) -> tuple[ReplayEntry, ...]:
        """The entries of the next replay: also the pending ones, before all later entries."""
        at = self._pending_at
        return (*self.entries[:at], *self.pending, *self.entries[at:])

    def add(self, entry: ReplayEntry) -> None:
        """Add an entry. If it repeats a pending entry, that one is no longer pending."""
        repeated = [_repeat_key(each) for each in self.pending]
        if (key := _repeat_key(entry)) in repeated:
            index = repeated.index(key)
            if index == 0 and self._pending_at == len(self.entries):
                self._pending_at += 1  # the user goes on where the replay ended
            self.pending = (*self.pending[:index], *self.pending[index + 1 :])
        self.entries += (entry,)
        names = _names_set_by(entry) if self.lost or self.not_carried else set()
        for name in names:
            self.lost.pop(name, None)
        self.not_carried = {
            path: reason
            for path, reason in self.not_carried.items()
            if root_name(path) not in names
        }

    def describe_not_carried(self, name: str) -> str:
        """Say how to get a name that a heal could not carry; "" for other names."""
        why = self.not_carried.get(name)
        if why is None:
            return ""
        cell = cell_that_assigned(name, self.entries)
        how = f"run the line of cell [{cell}] that makes it again" if cell else "make it again"
        where = "all ranks" if why in ON_ALL_RANKS else "each rank that does not have it"
        return f"The heal did not carry `{name}` ({why}): {how} on {where}."

    def set_pending(self, pending: Sequence[ReplayEntry], *, clears_entries: bool = False) -> None:
        """Set the entries that a replay did not run.

        ``clears_entries``: the ranks that had run the entries are gone, and new ones have run none.
        """
        if clears_entries:
            self._lose_entries()
        self.pending, self._pending_at = tuple(pending), len(self.entries)

    def clear(self) -> None:
        """Clear the log, because the namespaces of new ranks are empty.

        If the log was empty already, the pending entries stay: a replay must still run them.
        """
        self.pending = () if self.entries else self.pending
        self._lose_entries()
        self._pending_at = 0
        self.is_rejoined = False
        self.not_carried = {}

    def _lose_entries(self) -> None:
        for entry in self.entries:
            number = entry.execution_count if isinstance(entry, CellRequest) else 0
            self.lost |= dict.fromkeys(_names_set_by(entry), number)
        self.entries = ()


def assigned_names(source: str) -> set[str]:
    """Return the names that source code binds outside its functions and comprehensions.

    The bytecode tells: since Python 3.12, ``symtable`` lists the names of comprehensions too.

    >>> sorted(assigned_names("import os.path; x = [i for i in range(2)]; (z := 1)"))
    ['os', 'x', 'z']
    """
    instructions = dis.get_instructions(compile_cell(source))
    return {each.argval for each in instructions if each.opname in STORES}


def compile_cell(source: str) -> CodeType:
    """Compile a cell.

    Raises:
        SyntaxError: the cell contains a magic.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks showed them when the cell ran
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code: CodeType = compile(source, "cell", "exec", flags, dont_inherit=True)
    return code


def _repeat_key(entry: ReplayEntry) -> tuple[object, ...]:
    """Return a key that is equal for an entry and its repetition."""
    return entry.names if isinstance(entry, PushRecord) else entry.source, entry.ranks


def names_set_by(entries: Sequence[ReplayEntry]) -> set[str]:
    """Return the names that entries bind."""
    return set().union(*map(_names_set_by, entries))


def _names_set_by(entry: ReplayEntry) -> set[str]:
    if isinstance(entry, PushRecord):
        return set(entry.names)
    try:
        return assigned_names(entry.source)
    except SyntaxError:  # it contains a magic
        return set()


def root_name(path: str) -> str:
    """Return the variable at the start of a path.

    >>> root_name("trainer.state['step']")
    'trainer'
    >>> root_name("a Trainer in box (2)")
    'box'
    """
    path = re.sub(r"^an? \w+ in ", "", path)
    return re.split(r"\W", path, maxsplit=1)[0]


def cell_that_assigned(name: str, entries: Sequence[ReplayEntry]) -> int:
    """Return the prompt number of the last cell that assigned a name; 0 if there is none.

    ``name`` may be a path, such as ``state['trainer']``; its first name counts.

    >>> cells = [CellRequest(source="lock = 1", execution_count=4), CellRequest(source="!ls")]
    >>> cell_that_assigned("lock", cells), cell_that_assigned("x", cells)
    (4, 0)
    """
    name = root_name(name)
    for entry in reversed(entries):
        if isinstance(entry, CellRequest) and name in _names_set_by(entry):
            return entry.execution_count
    return 0


def describe_entries(entries: Sequence[ReplayEntry]) -> str:
    """Describe entries in a few words; cells by their prompt numbers.

    >>> cells = [CellRequest(source="", execution_count=number) for number in (2, 3, 5)]
    >>> describe_entries([*cells, PushRecord(("x", "y"), None, None)])
    'cells 2-3,5, the push of x, y'
    >>> describe_entries([CellRequest(source="") for _ in range(3)]), describe_entries([])
    ('3 cells', 'nothing')
    >>> describe_entries([*cells, CellRequest(source="", command="fault kill --step 3")])
    'cells 2-3,5, 1 fault command'
    """
    cells = [entry for entry in entries if isinstance(entry, CellRequest)]
    commands = Counter(cell.command.partition(" ")[0] for cell in cells if cell.command)
    numbers = [cell.execution_count for cell in cells if not cell.command]
    names = [name for entry in entries if isinstance(entry, PushRecord) for name in entry.names]
    parts = []
    if len(numbers) > len(set(numbers)):  # one notebook cell ran as several cells
        parts.append(plural(len(numbers), "cell"))
    elif numbers:
        parts.append(f"cell{'s' if len(numbers) > 1 else ''} {format_number_ranges(numbers)}")
    parts += [plural(count, f"{name} command") for name, count in commands.items()]
    if names:
        parts.append(f"the push of {', '.join(dict.fromkeys(names))}")
    return ", ".join(parts) or "nothing"
