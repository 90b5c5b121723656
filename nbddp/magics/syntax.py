"""A cell's syntax is checked before anything is started for it."""

from __future__ import annotations

import ast
import builtins

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbddp.group.scripts import explain

_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST


def check_syntax(shell: InteractiveShell, cell: str, first_line: int) -> None:
    """Find out what is wrong with a cell whose code begins in line ``first_line``.

    Raises:
        UsageError: with the line and what is wrong in it.
    """
    if not cell.strip():
        raise UsageError("the cell is empty: nothing to run")
    source = "\n" * (first_line - 1) + shell.transform_cell(cell)
    try:
        compile(source, "cell", "exec", _FLAGS)
    except SyntaxError as error:
        raise UsageError(explain(error)) from None


def unquoted(expression: str) -> str:
    """An expression without the quotes that a shell would have taken off, and IPython's semicolon.

    >>> unquoted(" 'rank + 1' "), unquoted("d['a'];")
    ('rank + 1', "d['a']")
    """
    text = expression.strip().removesuffix(";").rstrip()
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted and text[0] not in text[1:-1] else text


def set_unread(source: str, name: str) -> int:
    r"""The line, from 1, that sets a name before anything can have read it; 0 if that is unsure.

    >>> set_unread("import os\nlr = 0.1\ntrain(lr)", "lr"), set_unread("lr = lr * 2", "lr")
    (2, 0)
    """
    tree: ast.Module = compile(source, "cell", "exec", _FLAGS)
    for statement in tree.body:
        if any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(statement)):
            return statement.lineno if name in _stored(statement) else 0
        if any(map(_calls_anything, ast.walk(statement))):
            return 0
    return 0


def _stored(statement: ast.stmt) -> set[str]:
    """The names that it sets whatever happens, without a look at what they were."""
    match statement:
        case ast.Assign(targets=targets, value=read):
            pass
        case ast.AnnAssign(target=target, value=ast.expr() as read):
            targets = [target]
        case ast.For(target=target, iter=read):
            targets = [target]
        case _:
            return set()
    if any(map(_calls_anything, ast.walk(read))):
        return set()
    names = [each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    unread = {each.id for each in names if isinstance(each.ctx, ast.Store)}
    return unread - {each.id for each in ast.walk(read) if isinstance(each, ast.Name)}


def _calls_anything(node: ast.AST) -> bool:
    """Whether it calls what another cell may have defined, which may read any name."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    return not hasattr(builtins, node.func.id)
