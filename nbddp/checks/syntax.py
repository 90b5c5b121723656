"""A cell as Python alone, and small questions about calls and expressions."""

from __future__ import annotations

import ast
import re

_CELL_MAGIC = re.compile(r"%%(\w+)")
_RUNS_PYTHON = ("capture", "ddp", "local", "prun", "time", "timeit")
_IPYTHON_LINE = re.compile(r"^(\s*)(?:[%!]|\?|\w[\w.]*\?+\s*$)")
_ASSIGNS_MAGIC = re.compile(r"^(\s*[\w, ]+=)\s*[%!].*$")


def without_ipython(text: str) -> str:
    r"""A cell without IPython's own lines, as many lines as before.

    >>> without_ipython("!ls\nx = %timeit -o f()\nfor i in x:\n    %time i")
    'pass\nx = None\nfor i in x:\n    pass'
    >>> without_ipython("%%bash\nls")
    '\n'
    """
    magic = _CELL_MAGIC.match(text.lstrip())
    if magic and magic[1] not in _RUNS_PYTHON:
        return "\n" * text.count("\n")
    if not re.search(r"[%!?]", text):
        return text
    plain = "\n".join(map(_plain_line, text.split("\n")))
    if plain == text:  # a remainder, a format, a string
        return text
    try:
        ast.parse(text)
    except SyntaxError:
        return plain
    return text


def _plain_line(line: str) -> str:
    if found := _IPYTHON_LINE.match(line):
        return f"{found[1]}pass"
    return _ASSIGNS_MAGIC.sub(r"\1 None", line)


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """An argument of a call, by its name or its place; None if it is not given."""
    for each in call.keywords:
        if each.arg == name:
            return each.value
    if position is not None and len(call.args) > position:
        return call.args[position]
    return None


def is_true(node: ast.AST | None) -> bool:
    """Whether it is written as ``True``."""
    return isinstance(node, ast.Constant) and node.value is True


def is_false(node: ast.AST | None) -> bool:
    """Whether it is written as ``False``."""
    return isinstance(node, ast.Constant) and node.value is False


def may_be_true(node: ast.AST | None) -> bool:
    """Return whether an argument that is false by default is given, and not as ``False``."""
    return node is not None and not is_false(node)


def has_star_arguments(call: ast.Call) -> bool:
    """Whether it has ``*`` or ``**`` among its arguments, so that nobody knows what is given."""
    return any(isinstance(each, ast.Starred) for each in call.args) or any(
        each.arg is None for each in call.keywords
    )


def plain_names(node: ast.AST) -> set[str]:
    """Every plain name inside it."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def names_in(node: ast.AST) -> set[str]:
    """Every plain name and every attribute's name inside it."""
    attributes = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return attributes | plain_names(node)
