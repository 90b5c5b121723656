"""A cell's syntax is checked before anything is started for it."""

from __future__ import annotations

import ast

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbddp.group.scripts import explain


def check_syntax(shell: InteractiveShell, cell: str, first_line: int) -> None:
    """Find out what is wrong with a cell whose code begins in line ``first_line``.

    Raises:
        UsageError: with the line and what is wrong in it.
    """
    if not cell.strip():
        raise UsageError("the cell is empty: nothing to run")
    source = "\n" * (first_line - 1) + shell.transform_cell(cell)
    try:
        compile(source, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
    except SyntaxError as error:
        raise UsageError(explain(error)) from None
