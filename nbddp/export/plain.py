"""IPython's syntax as plain Python, or as a comment that says why it has no place in a script."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from IPython.core.inputtransformer2 import TransformerManager

from nbddp.export.edits import Edit, Source

_CELL_MAGIC = re.compile(r"%%(\w+)[^\n]*\n?")
_UNWRAPPED = frozenset({"time", "timeit", "capture", "prun", "memit"})  # they run their cell
_EXPANDED = re.compile(r"\$\w|\{")

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
    """

    text: str
    modules: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()


def to_plain(cell: str) -> Plain:
    """A cell as a script has it."""
    magic = _CELL_MAGIC.match(cell.lstrip())
    if magic is None:
        return _without_magics(cell)
    body = cell.lstrip()[magic.end() :]
    if magic[1] in _UNWRAPPED:
        inside = to_plain(body)
        text = f"# {magic[0].rstrip()}\n{inside.text}"
        return Plain(text, inside.modules, inside.left_out)
    head = magic[0].rstrip()
    reason = f"%%{magic[1]} has no equivalent in a script"
    kept = "\n".join(f"# {line}".rstrip() for line in cell.strip().split("\n"))
    return Plain(f"# left out: {reason}\n{kept}", left_out=(f"{head}: {reason}",))


def _without_magics(cell: str) -> Plain:
    source = Source(TransformerManager().transform_cell(cell))
    found = [*_changes(source)]
    text = source.apply(change.edit for change in found)
    modules = frozenset(change.module for change in found if change.module)
    return Plain(text, modules, tuple(change.left_out for change in found if change.left_out))


@dataclass(frozen=True, slots=True)
class _Change:
    edit: Edit
    module: str = ""
    left_out: str = ""


def _changes(source: Source) -> Iterator[_Change]:
    for statement, is_outside in _innermost(source.tree.body):
        call = _of_ipython(statement)
        if call is not None:
            yield _change(source, statement, call)
        elif is_outside and _awaits(statement):
            yield _left(source, statement, "await needs a loop: asyncio.run() has one")


def _innermost(
    body: Iterable[ast.stmt], *, is_outside: bool = True
) -> Iterator[tuple[ast.stmt, bool]]:
    """Statements that hold no others, and whether they are outside all functions."""
    for statement in body:
        inside = [
            each for each in ast.iter_child_nodes(statement) if not isinstance(each, ast.expr)
        ]
        held = list(_statements(inside))
        if not held or isinstance(statement, ast.AsyncFor | ast.AsyncWith):
            yield statement, is_outside
            continue
        is_function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _innermost(held, is_outside=is_outside and not is_function)


def _statements(nodes: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    """Those among them, and those in handlers and cases."""
    for node in nodes:
        if isinstance(node, ast.stmt):
            yield node
        elif isinstance(node, ast.ExceptHandler | ast.match_case):
            yield from node.body


def _awaits(statement: ast.stmt) -> bool:
    kinds = (ast.Await, ast.AsyncFor, ast.AsyncWith)
    return any(isinstance(node, kinds) for node in ast.walk(statement))


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


def _change(source: Source, statement: ast.stmt, call: ast.Call) -> _Change:
    words = [each.value for each in call.args if isinstance(each, ast.Constant)]
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if method in ("system", "getoutput") and len(words) == 1:
        return _Change(source.replacing(call, _command(method, str(words[0]))), "subprocess")
    if method == "run_line_magic" and len(words) == 2:
        name, line = map(str, words)
        make = _EQUIVALENTS.get(name)
        text = make(line) if make is not None else None
        if text is not None:
            return _Change(source.replacing(call, text), "os" if "os." in text else "")
        why = _WHY.get(name, f"%{name} has no equivalent in a script")
        return _left(source, statement, why, f"%{name} {line}".rstrip())
    return _left(source, statement, "IPython is not there in a script")


def _left(source: Source, statement: ast.stmt, reason: str, shown: str = "") -> _Change:
    shown = shown or source.segment(statement).partition("\n")[0]
    return _Change(source.commenting(statement, reason), left_out=f"{shown}: {reason}")


def _command(method: str, line: str) -> str:
    text = f"f{line!r}" if _EXPANDED.search(line) and "$" not in line else repr(line)
    if method == "system":
        return f"subprocess.run({text}, shell=True, check=False)"
    options = "shell=True, check=False, capture_output=True, text=True"
    return f"subprocess.run({text}, {options}).stdout.splitlines()"


def _time(line: str) -> str | None:
    inside = to_plain(line)
    return None if inside.left_out or "\n" in inside.text.strip() else inside.text.strip()


def _env(line: str) -> str | None:
    name, equals, value = line.partition("=")
    if not equals:
        name, _, value = line.partition(" ")
    is_plain = name.strip().isidentifier() and value and not _EXPANDED.search(value)
    return f"os.environ[{name.strip()!r}] = {value.strip()!r}" if is_plain else None


def _cd(line: str) -> str | None:
    folder = line.removeprefix("-q ").strip()
    return None if not folder or folder == "-" else f"os.chdir({folder!r})"


_EQUIVALENTS: Mapping[str, Callable[[str], str | None]] = {
    "time": _time,
    "env": _env,
    "set_env": _env,
    "cd": _cd,
    "pwd": lambda _line: "os.getcwd()",
}
