"""Find the cells that make again what a heal could not carry to a new rank."""

from __future__ import annotations

import dis
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType

from nbddp.record.cell import CellRequest, ReplayEntry
from nbddp.record.push_store import PushRecord
from nbddp.record.replay_log import STORES, ReplayLog, compile_cell, root_name
from nbddp.wire.request_messages import KEEPS_RANK

_LOADS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}


@dataclass(slots=True)
class _Names:
    """The names of a cell.

    Attributes:
        loaded: names that the cell reads outside its functions.
        needed: the part of ``loaded`` that the cell reads before it binds them.
        bound: names that the cell binds.
        deleted: names that the cell deletes and does not bind again.
        bodies: for each bound name, the names that its functions, classes and lambdas read.
        values: for each bound name, the other names in the expression.
    """

    loaded: set[str] = field(default_factory=set)
    needed: set[str] = field(default_factory=set)
    bound: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    bodies: dict[str, set[str]] = field(default_factory=dict)
    values: dict[str, set[str]] = field(default_factory=dict)

    def load(self, names: Iterable[str]) -> None:
        """Add names that the cell reads."""
        self.loaded |= {*names}
        self.needed |= {*names} - self.bound


def entries_to_rerun(
    entries: Sequence[ReplayEntry], not_carried: Mapping[str, str], source: str | None = None
) -> list[ReplayEntry]:
    """Return the entries that make trainers again, in order, with those that they depend on.

    An entry depends on the entries that made the names it reads, if the ranks do not all have them:
    a heal could not carry them, or a later cell deleted them.

    Args:
        entries: the cells that succeeded, and the pushes.
        not_carried: the reason for each name or path that a heal could not carry.
        source: the cell that needs the trainers; None for all trainers.

    >>> cells = ["def fit(): t.train()", "args = Args()", "t = Trainer(args)", "other = Args()"]
    >>> entries = [CellRequest(source=each, execution_count=n) for n, each in enumerate(cells)]
    >>> not_carried = dict.fromkeys(["args", "t", "other"], KEEPS_RANK)
    >>> [each.execution_count for each in entries_to_rerun(entries, not_carried, "fit()")]
    [1, 2]
    >>> [each.execution_count for each in entries_to_rerun(entries, not_carried)]
    [1, 2, 3]
    """
    cells = [_names_of(entry) for entry in entries]
    trainers = trainer_roots(not_carried)
    missing = trainers | {name for name in not_carried if name.isidentifier()} | _deleted(cells)
    end = len(cells)
    wanted = trainers
    if source is not None:
        failed = _names_in(source)
        wanted = trainers & _follow(failed.loaded, [*cells, failed], end + 1)
    pending, chosen = [(name, end) for name in wanted], set[int]()
    while pending:
        index = _index_of_maker(*pending.pop(), cells)
        if index is None or index in chosen:
            continue
        chosen.add(index)
        cell = cells[index]
        needed = _follow(cell.loaded, cells, index + 1) - (cell.bound - cell.needed)
        pending += [(name, index) for name in needed & missing]
    found: dict[object, ReplayEntry] = {}
    for index in sorted(chosen):
        entry = entries[index]
        key: object = entry
        if isinstance(entry, CellRequest):  # the log has it again if a replay has run it
            key = entry.execution_count, entry.source
        found.setdefault(key, entry)
    return [*found.values()]


def cells_to_rerun(log: ReplayLog, source: str | None = None) -> set[int]:
    """Return the prompt numbers of the cells of :func:`entries_to_rerun`."""
    entries = entries_to_rerun(log.entries, log.not_carried, source)
    return {each.execution_count for each in entries if isinstance(each, CellRequest)}


def trainer_roots(not_carried: Mapping[str, str]) -> set[str]:
    """Return the variables that are trainers, or that contain one."""
    return {root_name(path) for path, reason in not_carried.items() if reason == KEEPS_RANK}


def _index_of_maker(name: str, before: int, cells: Sequence[_Names]) -> int | None:
    return next((n for n in reversed(range(before)) if name in cells[n].bound), None)


def _deleted(cells: Sequence[_Names]) -> set[str]:
    """Return the names that a cell bound and that a later one deleted."""
    deleted: set[str] = set()
    for cell in cells:
        deleted = (deleted - cell.bound) | cell.deleted
    return deleted


def _follow(names: Collection[str], cells: Sequence[_Names], before: int) -> set[str]:
    """Return names, and those that the functions and classes under these names read."""
    found, pending = set[str](), [*names]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        index = _index_of_maker(name, before, cells)
        if index is None:
            continue
        pending += cells[index].bodies.get(name, ())
        for path in cells[index].values.get(name, ()):  # partial(function), or an object of a class
            made_in = _index_of_maker(path, before, cells)
            if made_in is not None and cells[made_in].bodies.get(path):
                pending.append(path)
    return found


def _names_of(entry: ReplayEntry) -> _Names:
    if isinstance(entry, PushRecord):
        return _Names(bound={*entry.names})
    return _names_in(entry.source)


def _names_in(source: str) -> _Names:
    """Find the names in the bytecode of a cell. Of a cell with magics, use all words."""
    try:
        code = compile_cell(source)
    except SyntaxError:
        return _Names(loaded={*re.findall(r"\w+", source)})
    names, read, codes = _Names(), set[str](), list[CodeType]()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _LOADS:
            read.add(instruction.argval)
            names.load([instruction.argval])
        elif isinstance(instruction.argval, CodeType):
            codes.append(instruction.argval)
        elif instruction.opname in STORES:
            _bind(names, instruction.argval, read, codes)
            read, codes = set(), []
        elif instruction.opname == "DELETE_NAME":
            names.deleted.add(instruction.argval)
        elif instruction.opname == "POP_TOP":
            names.load(set().union(*map(_globals_of, codes)))
            read, codes = set(), []
    return names


def _bind(names: _Names, name: str, read: set[str], codes: Sequence[CodeType]) -> None:
    """Add a name that a cell binds to an expression with these names, functions and classes."""
    for code in codes:
        if code.co_name != name:  # a lambda or a comprehension, which may run at once
            names.load(_globals_of(code))
    names.bound.add(name)
    names.deleted.discard(name)
    names.bodies.setdefault(name, set()).update(*map(_globals_of, codes))
    names.values.setdefault(name, set()).update(read)


def _globals_of(code: CodeType) -> set[str]:
    """Return the global names that a function or class reads, with the functions in it."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname in _LOADS}
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return found.union(*map(_globals_of, inner))
