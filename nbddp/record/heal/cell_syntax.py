"""Remove IPython syntax from a cell, and inspect calls and expressions."""

from __future__ import annotations

import ast
import re

_CELL_MAGIC = re.compile(r"%%(\w+)")
_RUNS_PYTHON = ("capture", "ddp", "local", "prun", "time", "timeit")
_IPYTHON_LINE = re.compile(r"^(\s*)(?:[%!]|\?|\w[\w.]*\?+\s*$)")
_ASSIGNS_MAGIC = re.compile(r"^(\s*[\w, ]+=)\s*[%!].*$")


def without_ipython(text: str) -> str:
    r"""Replace IPython syntax in a cell; the number of lines stays the same.

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
    if plain == text:  # the characters are Python operators, or in a string
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
    """Return an argument of a call, by its name or position; None if it is not given."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is not None and len(call.args) > position:
        return call.args[position]
    return None


def argument_text(call: ast.Call, name: str, position: int | None = None) -> str:
    """Return the code of an argument, by its name or position; empty if it is not given."""
    given = argument(call, name, position)
    return ast.unparse(given) if given else ""


def has_star_arguments(call: ast.Call) -> bool:
    """Return whether a call has ``*`` or ``**`` arguments, whose content is unknown."""
    return any(isinstance(each, ast.Starred) for each in call.args) or any(
        keyword.arg is None for keyword in call.keywords
    )


def last_name(node: ast.AST) -> str:
    """Return a plain name, or the last part of a dotted name; empty for other nodes."""
    return str(getattr(node, "id", getattr(node, "attr", "")))


def plain_names(node: ast.AST) -> set[str]:
    """Return every plain name inside a node."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def names_in(node: ast.AST) -> set[str]:
    """Return every plain name and every attribute name inside a node."""
    return {*map(last_name, ast.walk(node))} - {""}
