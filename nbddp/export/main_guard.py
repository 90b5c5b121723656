"""What a script runs only under ``if __name__ == "__main__":``, and what stands outside of it.

A process that is spawned, as for a DataLoader on macOS, imports the script. It must find the
functions and classes there, and run nothing.
"""

from __future__ import annotations

import ast
import builtins
import dis
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from types import CodeType

from nbddp.record.replay_log import assigned_names

GUARD = 'if __name__ == "__main__":'
OF_IPYTHON = frozenset({"display", "get_ipython", "In", "Out", "_", "__", "___"})
BUILTINS = frozenset(vars(builtins)) - OF_IPYTHON - {"__IPYTHON__"}
_OF_MODULES = {"__name__", "__file__", "__doc__", "__annotations__", "__builtins__", "__spec__"}
_STORES = frozenset({"STORE_NAME", "STORE_GLOBAL"})
_LOADS = frozenset({"LOAD_NAME", "LOAD_GLOBAL"})

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def split_by_guard(
    text: str, top: set[str], *, is_for_all: bool = True
) -> Iterator[tuple[bool, str]]:
    """Yield the parts of a cell in their order, each with whether it must be guarded.

    Args:
        text: of the cell, in plain Python.
        top: names that are there in every process; those that the cell adds are added.
        is_for_all: whether all ranks run the cell; else all of it is guarded.
    """
    lines = text.split("\n")
    groups = _group_by_line(ast.parse(text).body)
    if not groups and text.strip():
        yield False, text.strip("\n")
    # the comments above a statement go with it
    ends = [*(each[-1].end_lineno or 0 for each in groups[:-1]), len(lines)]
    flags = [not (is_for_all and _may_stand_outside(each, top)) for each in groups]
    start = 0
    for must_be_guarded, group in groupby(zip(flags, ends, strict=False), key=itemgetter(0)):
        *_, (_, end) = group
        yield must_be_guarded, "\n".join(lines[start:end]).strip("\n")
        start = end


def _group_by_line(body: Iterable[ast.stmt]) -> list[list[ast.stmt]]:
    """Return statements, those together that share a line."""
    groups: list[list[ast.stmt]] = []
    for each in body:
        if groups and each.lineno <= (groups[-1][-1].end_lineno or 0):
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def _may_stand_outside(statements: list[ast.stmt], top: set[str]) -> bool:
    """Return whether all may; what they bind is there from then on."""
    if not all(_needs_no_guard(each, top) for each in statements):
        return False
    top |= {name for each in statements for name in assigned_names(ast.unparse(each))}
    return True


def _needs_no_guard(statement: ast.stmt, top: set[str]) -> bool:
    """Return whether it is an import, a constant, or a definition that needs nothing guarded."""
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
    """Return whether it is a number, a text, or a tuple of them: nobody can change it."""
    if isinstance(value, ast.Tuple):
        return all(map(_is_literal, value.elts))
    return isinstance(value, ast.Constant)


def names_needed_at_definition(node: Definition) -> set[str]:
    r"""Return the names that must exist when a function or class is made.

    >>> [made] = ast.parse("@a\ndef f(x: b = c) -> d: return e").body
    >>> sorted(names_needed_at_definition(made))
    ['a', 'b', 'c', 'd']
    """
    made = ast.parse(ast.unparse(node))
    for each in ast.walk(made):  # what runs later does not count
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            each.body = [ast.Pass()]
        elif isinstance(each, ast.Lambda):
            each.body = ast.Constant(None)
    needed: set[str] = set()
    for steps in _instructions(ast.unparse(made)):
        bound: set[str] = set()
        for step in steps:
            if step.opname in _STORES:
                bound.add(step.argval)
            elif step.opname in _LOADS and step.argval not in bound:
                needed.add(step.argval)
    return needed - _OF_MODULES


def undefined_names(program: str) -> list[str]:
    """Return the global names that it reads and nothing in it binds, sorted.

    >>> undefined_names("f = lambda: a + len(b); b = 1")
    ['a']

    Raises:
        SyntaxError: it does not compile.
    """
    steps = [step for steps in _instructions(program) for step in steps]
    bound = {step.argval for step in steps if step.opname in _STORES}
    used = {step.argval for step in steps if step.opname in _LOADS}
    return sorted(used - bound - BUILTINS - _OF_MODULES)


def _instructions(program: str) -> Iterator[Iterator[dis.Instruction]]:
    """Yield those of the module, and of each function, class and comprehension in it."""
    pending = [compile(program, "export", "exec", dont_inherit=True)]
    while pending:
        code = pending.pop()
        yield dis.get_instructions(code)
        pending += [each for each in code.co_consts if isinstance(each, CodeType)]


def indent(text: str, margin: str = "    ") -> str:
    """Return the same source further in; texts of several lines keep their own lines."""
    fixed: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
        if is_text or isinstance(node, ast.JoinedStr):
            fixed |= {*range(node.lineno + 1, (node.end_lineno or 0) + 1)}  # type: ignore[attr-defined]
    lines = enumerate(text.split("\n"), start=1)
    return "\n".join(line if not line or row in fixed else margin + line for row, line in lines)
