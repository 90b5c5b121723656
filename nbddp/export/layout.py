"""A cell's place in a function: what may stand above goes up, what it binds stays global."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from nbddp.export.edits import Edit, Source
from nbddp.export.outline import Import
from nbddp.record.names import bound_names

_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_OF_TEXTS = (ast.JoinedStr,)  # before Python 3.12 nobody knows where its parts stand


@dataclass(frozen=True, slots=True)
class Body:
    """A cell's source that may stand in a function.

    Attributes:
        text: without what goes up.
        imports: that go up, a line each.
        definitions: functions and classes that go up, with the comments above them.
        names: what the text binds.
    """

    text: str
    imports: tuple[str, ...]
    definitions: tuple[str, ...]
    names: frozenset[str]


def to_body(text: str, *, up: Collection[int] | None = None, show: str = "") -> Body:
    """A cell's source as it may stand in a function.

    Args:
        text: plain Python.
        up: which of its statements go up; None for its imports.
        show: the call that the last value goes to, such as ``show({})``; empty for none.
    """
    source = Source(text)
    body = source.tree.body
    rows = [row for row, each in enumerate(body) if isinstance(each, Import)] if up is None else up
    moved = [body[row] for row in rows]
    edits = [*_moved(source, moved), *_freed(source), *_stars(source, body, rows)]
    last = body[-1] if body else None
    if show and isinstance(last, ast.Expr) and not _is_silent(source, last):
        edits += _shown(source, last, show)
    kept = source.apply(edits).strip("\n")
    return Body(
        text=kept,
        imports=tuple(ast.unparse(each) for each in moved if isinstance(each, Import)),
        definitions=tuple(
            source.between(source.commented(each), source.end(each))
            for each in moved
            if not isinstance(each, Import)
        ),
        names=frozenset(bound_names(kept)),
    )


def is_several(expression: str) -> bool:
    """Whether a call would take it for several values, as it does with ``x, y``."""
    call = ast.parse(f"f({expression}\n)", mode="eval").body
    if not isinstance(call, ast.Call):
        return True
    return len(call.args) != 1 or isinstance(call.args[0], ast.Starred)


def _shown(source: Source, last: ast.Expr, show: str) -> Iterator[Edit]:
    """Put the call around it, as one value."""
    before, _, after = show.partition("{}")
    if is_several(source.segment(last)):
        before, after = f"{before}(", f"){after}"
    yield Edit(source.begin(last), source.begin(last), before)
    yield Edit(source.end(last), source.end(last), after)


def _is_silent(source: Source, last: ast.Expr) -> bool:
    """Whether the notebook shows nothing: there is a semicolon, or nothing to show."""
    after = source.text.encode()[source.end(last) :].decode().lstrip()
    value = last.value
    is_print = isinstance(value, ast.Call) and source.segment(value.func) in ("print", "display")
    is_nothing = isinstance(value, ast.Constant) and value.value is None
    return after.startswith(";") or is_nothing or is_print


def _moved(source: Source, moved: Iterable[ast.stmt]) -> Iterator[Edit]:
    """Take statements away, with the line break behind them where they stand alone."""
    data = source.text.encode()
    for each in moved:
        is_import = isinstance(each, Import)
        begin = source.begin(each) if is_import else source.commented(each)
        end, rest = source.end(each), source.rest_of_line(each)
        begins_line = begin == 0 or data[begin - 1 : begin] == b"\n"
        if not begins_line or rest.strip().startswith(";"):  # another stands beside it
            yield Edit(begin, end, "pass")
        elif rest.strip() and is_import:  # a comment
            yield Edit(begin, end + len(rest.encode()) - len(rest.lstrip().encode()), "")
        else:
            yield Edit(begin, min(end + len(rest.encode()) + 1, len(data)), "")


def _stars(source: Source, body: Sequence[ast.stmt], up: Collection[int]) -> Iterator[Edit]:
    """What Python refuses in a function of an import that stays."""
    for row, each in enumerate(body):
        if isinstance(each, ast.ImportFrom) and row not in up and each.names[0].name == "*":
            yield source.replacing(each, f"exec({ast.unparse(each)!r}, globals())")


def _freed(source: Source) -> Iterator[Edit]:
    """What Python refuses for names that a function declares global, or what differs there."""
    for node in _outside(source.tree):
        if isinstance(node, ast.Global):
            yield source.commenting(node, "all names are global here")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if node.value is None:
                yield source.commenting(node, "it binds nothing")
            else:
                name = source.segment(node.target)
                yield Edit(source.begin(node), source.begin(node.value), f"{name} = ")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield from _looking_around(source, node, node.func)


def _looking_around(source: Source, call: ast.Call, function: ast.Name) -> Iterator[Edit]:
    """Calls that mean the names around them."""
    if function.id in ("locals", "vars", "dir") and not call.args:
        names = "globals()" if function.id != "dir" else "sorted(globals())"
        yield source.replacing(call, names)
    elif function.id == "exec" and len(call.args) == 1 and not call.keywords:
        end = source.end(call) - 1
        comma = "" if source.between(source.end(call.args[0]), end).strip().endswith(",") else ","
        yield Edit(end, end, f"{comma} globals()")


def _outside(tree: ast.AST) -> Iterator[ast.AST]:
    """What is in no function and no class."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, _INNER + _OF_TEXTS):
            yield node
            yield from _outside(node)
