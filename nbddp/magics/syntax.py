"""A cell's syntax is checked before anything is started for it."""

from __future__ import annotations

import ast

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
