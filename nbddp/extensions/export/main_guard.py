"""Split a script into code inside and outside of ``if __name__ == "__main__":``.

A spawned process, such as a DataLoader worker on macOS, imports the script. It must find the
functions and classes, and must not run the cells.
"""

from __future__ import annotations

import ast
import builtins
import dis
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from operator import itemgetter
from types import CodeType

from nbddp.record.replay_log import assigned_names

GUARD = 'if __name__ == "__main__":'
IPYTHON_NAMES = frozenset({"display", "get_ipython", "In", "Out", "_", "__", "___"})
BUILTINS = frozenset(vars(builtins)) - IPYTHON_NAMES - {"__IPYTHON__"}
_MODULE_NAMES = {"__name__", "__file__", "__doc__", "__annotations__", "__builtins__", "__spec__"}
_STORES = frozenset({"STORE_NAME", "STORE_GLOBAL"})
_LOADS = frozenset({"LOAD_NAME", "LOAD_GLOBAL"})

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def split_by_guard(
    text: str, top: set[str], *, is_for_all: bool = True
) -> Iterator[tuple[bool, str]]:
    """Yield the parts of a cell in their order, each with whether it must be guarded.

    Args:
        text: the cell in plain Python.
        top: the names that exist in every process; the function adds the cell's own names.
        is_for_all: whether all ranks run the cell; otherwise, all parts are guarded.
    """
    lines = text.split("\n")
    groups = _group_by_line(ast.parse(text).body)
    if not groups and text.strip():
        yield False, text.strip("\n")
    # comments above a statement belong to it
    ends = [*(each[-1].end_lineno or 0 for each in groups[:-1]), len(lines)]
    flags = [not (is_for_all and _may_be_unguarded(each, top)) for each in groups]
    start = 0
    for must_be_guarded, group in groupby(zip(flags, ends, strict=False), key=itemgetter(0)):
        *_, (_, end) = group
        yield must_be_guarded, "\n".join(lines[start:end]).strip("\n")
        start = end


def _group_by_line(body: Iterable[ast.stmt]) -> list[list[ast.stmt]]:
    """Group statements that share a line."""
    groups: list[list[ast.stmt]] = []
    for statement in body:
        if groups and statement.lineno <= (groups[-1][-1].end_lineno or 0):
            groups[-1].append(statement)
        else:
            groups.append([statement])
    return groups


def _may_be_unguarded(statements: list[ast.stmt], top: set[str]) -> bool:
    """Return whether all statements may be outside of the guard; add the names that they bind."""
    if not all(_needs_no_guard(each, top) for each in statements):
        return False
    top |= {name for each in statements for name in assigned_names(ast.unparse(each))}
    return True


def _needs_no_guard(statement: ast.stmt, top: set[str]) -> bool:
    """Return whether this is an import, a constant, or a definition without guarded names."""
    match statement:
        case ast.Import() | ast.ImportFrom():
            return True
        case ast.Assign(value=value, targets=targets):
            names = [each.id for each in targets if isinstance(each, ast.Name)]
            is_constant = len(names) == len(targets) and all(map(str.isupper, names))
            return is_constant and _is_literal(value)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return names_needed_at_definition(statement) <= top | BUILTINS
    return False


def _is_literal(value: ast.expr) -> bool:
    """Return whether this is an immutable literal: a number, a text, or a tuple of them."""
    if isinstance(value, ast.Tuple):
        return all(map(_is_literal, value.elts))
    return isinstance(value, ast.Constant)


def names_needed_at_definition(node: Definition) -> set[str]:
    r"""Return the names that must exist when a function or class is defined.

    >>> [made] = ast.parse("@a\ndef f(x: b = c) -> d: return e").body
    >>> sorted(names_needed_at_definition(made))
    ['a', 'b', 'c', 'd']
    """
    made = ast.parse(ast.unparse(node))
    for part in ast.walk(made):  # bodies run later
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            part.body = [ast.Pass()]
        elif isinstance(part, ast.Lambda):
            part.body = ast.Constant(None)
    needed: set[str] = set()
    for instructions in _instructions(ast.unparse(made)):
        bound: set[str] = set()
        for instruction in instructions:
            if instruction.opname in _STORES:
                bound.add(instruction.argval)
            elif instruction.opname in _LOADS and instruction.argval not in bound:
                needed.add(instruction.argval)
    return needed - _MODULE_NAMES


def undefined_names(program: str) -> list[str]:
    """Return the global names that a program reads but never binds, sorted.

    >>> undefined_names("f = lambda: a + len(b); b = 1")
    ['a']

    Raises:
        SyntaxError: the program does not compile.
    """
    instructions = [*chain.from_iterable(_instructions(program))]
    bound = {it.argval for it in instructions if it.opname in _STORES}
    used = {it.argval for it in instructions if it.opname in _LOADS}
    return sorted(used - bound - BUILTINS - _MODULE_NAMES)


def _instructions(program: str) -> Iterator[Iterator[dis.Instruction]]:
    """Yield the instructions of the module, and of each function, class and comprehension."""
    pending = [compile(program, "export", "exec", dont_inherit=True)]
    while pending:
        code = pending.pop()
        yield dis.get_instructions(code)
        pending += [each for each in code.co_consts if isinstance(each, CodeType)]


def indent(text: str, margin: str = "    ") -> str:
    """Indent source code, except inside of multi-line strings."""
    fixed: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
        if is_text or isinstance(node, ast.JoinedStr):
            fixed |= {*range(node.lineno + 1, (node.end_lineno or 0) + 1)}  # type: ignore[attr-defined]
    lines = enumerate(text.split("\n"), start=1)
    return "\n".join(line if not line or row in fixed else margin + line for row, line in lines)
