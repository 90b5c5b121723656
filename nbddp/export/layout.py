"""A cell's place in a function: its imports go up, what it binds stays global."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from nbddp.export.edits import Edit, Source
from nbddp.record.names import bound_names


@dataclass(frozen=True, slots=True)
class Body:
    """A cell's source that may stand in a function.

    Attributes:
        text: without its imports.
        imports: a line each.
        names: what it binds, imports excepted.
    """

    text: str
    imports: tuple[str, ...]
    names: frozenset[str]


def to_body(text: str, *, show: str = "") -> Body:
    """A cell's source as it may stand in a function.

    Args:
        text: plain Python.
        show: the call that the last value goes to, such as ``show({})``; empty for none.
    """
    source = Source(text)
    imports = [each for each in source.tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
    edits = [*_moved(source, imports), *_freed(source)]
    last = source.tree.body[-1] if source.tree.body else None
    if show and isinstance(last, ast.Expr) and not _is_silent(source, last):
        edits.append(source.replacing(last, show.format(source.segment(last.value))))
    body = source.apply(edits).strip("\n")
    lines = tuple(ast.unparse(each) for each in imports)
    return Body(body, lines, frozenset(bound_names(body)))


def _is_silent(source: Source, last: ast.Expr) -> bool:
    """Whether the notebook shows nothing: there is a semicolon, or nothing to show."""
    after = source.text.encode()[source.end(last) :].decode().lstrip()
    value = last.value
    is_print = isinstance(value, ast.Call) and source.segment(value.func) in ("print", "display")
    is_nothing = isinstance(value, ast.Constant) and value.value is None
    return after.startswith(";") or is_nothing or is_print


def _moved(source: Source, imports: list[ast.Import | ast.ImportFrom]) -> Iterator[Edit]:
    """Take imports away, with the line break behind them where they stand alone."""
    data = source.text.encode()
    for each in imports:
        begin, end = source.begin(each), source.end(each)
        is_alone = begin == 0 or data[begin - 1 : begin] == b"\n"
        if is_alone and data[end : end + 1] in (b"\n", b""):
            yield Edit(begin, min(end + 1, len(data)), "")
        else:  # a comment, or another statement, stands beside it
            yield Edit(begin, end, "pass")


def _freed(source: Source) -> Iterator[Edit]:
    """What Python refuses for a name that a function declares global."""
    for node in source.tree.body:
        if isinstance(node, ast.Global):
            yield source.commenting(node, "all names are global here")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if node.value is None:
                yield source.commenting(node, "it binds nothing")
            else:
                name = source.segment(node.target)
                yield Edit(source.begin(node), source.begin(node.value), f"{name} = ")
