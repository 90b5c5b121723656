"""IPython's syntax as plain Python, or as a comment that says why it has no place in a script."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from IPython.core.inputtransformer2 import TransformerManager

from nbddp.export.commands import command, expanded, script, writing
from nbddp.export.edits import Edit, Source

_CELL_MAGIC = re.compile(r"%%([\w!]+)([^\n]*)\n?")
_UNWRAPPED = frozenset({"time", "timeit", "capture", "prun", "memit"})  # they run their cell
_SHELLS = frozenset({"bash", "sh", "!", "sx", "system"})

_WHY = {
    "matplotlib": "a script has no page: plt.savefig() writes a figure",
    "pip": "install it before",
    "conda": "install it before",
    "load_ext": "a script has no extensions",
    "autoreload": "a script has no extensions",
}


@dataclass(frozen=True, slots=True)
class Plain:
    """Source without IPython's syntax.

    Attributes:
        text: Python.
        modules: what it needs to import besides what the cell did.
        left_out: what became a comment, in a line each.
        is_silent: whether the notebook showed nothing although the last line has a value here.
    """

    text: str
    modules: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()
    is_silent: bool = False

    @property
    def is_awaiting(self) -> bool:
        """Whether it awaits something outside of functions, as only a notebook's cell can."""
        code = compile(self.text, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        return bool(code.co_flags & inspect.CO_COROUTINE)


def to_plain(cell: str, names: Collection[str] | None = None) -> Plain:
    """A cell as a script has it.

    Args:
        cell: what was typed.
        names: that a command of the shell may speak of; None for any.
    """
    magic = _CELL_MAGIC.match(cell.lstrip())
    if magic is None:
        return _without_magics(cell, names)
    head, body = magic[0].rstrip(), cell.lstrip()[magic.end() :]
    if magic[1] in _UNWRAPPED:
        inside = to_plain(body, names)
        return replace(inside, text=f"# {head}\n{inside.text}")
    if magic[1] in _SHELLS and not magic[2].strip():
        return Plain(f"{script(body)}\n", frozenset({"subprocess"}), is_silent=True)
    if magic[1] in ("writefile", "file") and (text := writing(magic[2], body, names)):
        return Plain(f"{text}\n", frozenset({"pathlib"}), is_silent=True)
    reason = f"%%{magic[1]} has no equivalent in a script"
    kept = "\n".join(f"# {line}".rstrip() for line in cell.strip().split("\n"))
    return Plain(f"# left out: {reason}\n{kept}", left_out=(f"{head}: {reason}",))


def _without_magics(cell: str, names: Collection[str] | None) -> Plain:
    source = Source(TransformerManager().transform_cell(cell))
    found = [*_changes(source, names)]
    text = source.apply(change.edit for change in found)
    return Plain(
        text,
        modules=frozenset(change.module for change in found if change.module),
        left_out=tuple(change.left_out for change in found if change.left_out),
        is_silent=bool(source.tree.body) and _is_command(source.tree.body[-1]),
    )


def _is_command(statement: ast.stmt) -> bool:
    """Whether it is nothing but a command of the shell, whose end nobody is shown."""
    call = _of_ipython(statement)
    if call is None or not _is_alone(statement, call):
        return False
    return isinstance(call.func, ast.Attribute) and call.func.attr == "system"


def _is_alone(statement: ast.stmt, call: ast.Call) -> bool:
    return isinstance(statement, ast.Expr) and statement.value is call


@dataclass(frozen=True, slots=True)
class _Change:
    edit: Edit
    module: str = ""
    left_out: str = ""


def _changes(source: Source, names: Collection[str] | None) -> Iterator[_Change]:
    for statement in _innermost(source.tree.body):
        call = _of_ipython(statement)
        if call is not None:
            yield _change(source, statement, call, names)


def _innermost(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that hold no others."""
    for statement in body:
        inside = [
            each for each in ast.iter_child_nodes(statement) if not isinstance(each, ast.expr)
        ]
        held = list(_statements(inside))
        if held:
            yield from _innermost(held)
        else:
            yield statement


def _statements(nodes: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    """Those among them, and those in handlers and cases."""
    for node in nodes:
        if isinstance(node, ast.stmt):
            yield node
        elif isinstance(node, ast.ExceptHandler | ast.match_case):
            yield from node.body


def _of_ipython(statement: ast.stmt) -> ast.Call | None:
    """The call that IPython has made of a magic or a command."""
    for node in ast.walk(statement):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Call)
            and isinstance(node.func.value.func, ast.Name)
            and node.func.value.func.id == "get_ipython"
        ):
            return node
    return None


def _change(
    source: Source, statement: ast.stmt, call: ast.Call, names: Collection[str] | None
) -> _Change:
    words = [each.value for each in call.args if isinstance(each, ast.Constant)]
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if method in ("system", "getoutput") and len(words) == 1:
        text = command(method, str(words[0]), names)
        return _Change(source.replacing(call, text), "subprocess")
    if method == "run_line_magic" and len(words) == 2:
        name, line = map(str, words)
        make = _EQUIVALENTS.get(name)
        made = make(line, names) if make is not None else None
        if made is not None:
            return _Change(source.replacing(call, made), "os" if "os." in made else "")
        why = _WHY.get(name, f"%{name} has no equivalent in a script")
        shown = f"%{name} {line}".rstrip()
        return _left(source, statement, why, shown, is_alone=_is_alone(statement, call))
    return _left(source, statement, "IPython is not there in a script")


def _left(
    source: Source, statement: ast.stmt, reason: str, shown: str = "", *, is_alone: bool = False
) -> _Change:
    shown = shown or source.segment(statement).partition("\n")[0]
    edit = source.commenting(statement, reason, shown=shown if is_alone else "")
    return _Change(edit, left_out=f"{shown}: {reason}")


def _time(line: str, names: Collection[str] | None) -> str | None:
    inside = to_plain(line, names)
    return None if inside.left_out or "\n" in inside.text.strip() else inside.text.strip()


def _env(line: str, names: Collection[str] | None) -> str | None:
    name, equals, value = line.partition("=")
    if not equals:
        name, _, value = line.partition(" ")
    is_setting = name.strip().isidentifier() and value
    return (
        f"os.environ[{name.strip()!r}] = {expanded(value.strip(), names)}" if is_setting else None
    )


def _cd(line: str, names: Collection[str] | None) -> str | None:
    folder = line.removeprefix("-q ").strip()
    if not folder or folder.startswith("-"):
        return None
    path = expanded(folder, names)
    return f"os.chdir(os.path.expanduser({path}))" if folder[0] == "~" else f"os.chdir({path})"


_EQUIVALENTS: Mapping[str, Callable[[str, Collection[str] | None], str | None]] = {
    "time": _time,
    "env": _env,
    "set_env": _env,
    "cd": _cd,
    "pwd": lambda _line, _names: "os.getcwd()",
}
