"""What of the cells may stand above all of them: imports, functions and classes.

A process that is spawned, as for a DataLoader on macOS, imports the script and finds there what
stands outside of ``main()``. What moves must mean the same at its new place: it is bound only
once, and what it needs when it is made is there already.
"""

from __future__ import annotations

import ast
import dis
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType

from nbddp.export.edits import Source
from nbddp.export.names import BUILTINS
from nbddp.export.needs import Definition, Needs
from nbddp.record.names import bound_names

Import = ast.Import | ast.ImportFrom

# from here on it may matter where an import stands
_MOVES = re.compile(
    r"\bsys\s*\.\s*(path|modules|meta_path)\b|\benviron\b|\b(chdir|putenv|write_text|addsitedir)\b"
    r"|\bsubprocess\b|\bos\s*\.\s*system\b"
)
_SAFE_MODULES = frozenset(
    [
        "abc",
        "collections",
        "contextlib",
        "dataclasses",
        "enum",
        "functools",
        "operator",
        "typing",
        "typing_extensions",
    ]
)
_SAFE_CALLS = frozenset({"torch.no_grad", "torch.inference_mode", "torch.enable_grad"})
_UNSAFE_BUILTINS = frozenset(["__import__", "breakpoint", "eval", "exec", "input", "open", "print"])


class Outline:
    """Decides for each statement of a cell whether it may go up.

    Args:
        texts: of the cells, in plain Python, in their order.
        given: names that are there before the first cell, with the import that makes each, or "".
    """

    def __init__(self, texts: Sequence[str], given: Mapping[str, str]) -> None:
        self._sources = [Source(text) for text in texts]
        self._makers: dict[str, set[str]] = {}
        for name, maker in given.items():
            self._note(name, maker or "given")  # no import has this name
        self._stars: dict[str, frozenset[str]] = {}
        for number, source in enumerate(self._sources):
            for row, statement in enumerate(source.tree.body):
                self._note_all(source, statement, f"{number} {row}")
        # names that are there above all cells
        self._top = {name for name, maker in given.items() if maker}
        self._is_moved = self._is_hidden = self._has_stars_on_top = False
        self._up = [self._imports(source) for source in self._sources]
        made = [each for each in self._statements() if isinstance(each, Definition)]
        self._needed = names_in(made)
        for source, rows in zip(self._sources, self._up, strict=True):
            rows |= self._definitions(source)

    def up(self, number: int) -> frozenset[int]:
        """Which statements of a cell go up."""
        return frozenset(self._up[number])

    def is_made_by(self, name: str, maker: str) -> bool:
        """Whether nothing else in the cells binds a name."""
        return self._makers.get(name, {maker}) == {maker} and name not in self.star_names

    @property
    def unknown_stars(self) -> list[str]:
        """Modules of which all names were imported, and nobody here knows which these are."""
        return sorted(name for name in self._stars if name not in sys.modules)

    @property
    def star_names(self) -> frozenset[str]:
        """What the others are known to bring."""
        return frozenset().union(*self._stars.values())

    # ---- who binds what

    def _note(self, name: str, maker: str) -> None:
        self._makers.setdefault(name, set()).add(maker)

    def _statements(self) -> Iterator[ast.stmt]:
        return (statement for source in self._sources for statement in source.tree.body)

    def _note_all(self, source: Source, statement: ast.stmt, place: str) -> None:
        if isinstance(statement, Import):
            for name, maker in makers(statement):
                if name == "*":
                    self._stars[maker] = star_names(maker)
                else:
                    self._note(name, maker)
            return
        own = statement.name if isinstance(statement, Definition) else constant(statement)
        text = source.segment(statement)
        for name in _bound(text):
            self._note(name, text if name == own else place)

    # ---- imports

    def _imports(self, source: Source) -> set[int]:
        """Those of a cell that go up; cells are asked for in their order."""
        rows: set[int] = set()
        for row, statement in enumerate(source.tree.body):
            if isinstance(statement, Import) and self._may_go_up(statement):
                rows.add(row)
                names = {name for name, _ in makers(statement)}
                self._top |= names
                self._has_stars_on_top |= "*" in names
            else:
                is_star = isinstance(statement, Import) and ("*" in dict(makers(statement)))
                self._is_moved |= is_star or bool(_MOVES.search(source.segment(statement)))
        return rows

    def _may_go_up(self, statement: Import) -> bool:
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            return True
        if self._is_moved:
            return False
        clashes = frozenset(self._makers) & self.star_names
        return all(
            maker in sys.modules and not clashes if name == "*" else self.is_made_by(name, maker)
            for name, maker in makers(statement)
        )

    # ---- functions and classes

    def _definitions(self, source: Source) -> set[int]:
        rows: set[int] = set()
        for row, statement in enumerate(source.tree.body):
            if self._is_unknown(statement):
                self._is_hidden = True  # what comes now may have a name that the star has
            if self._is_hidden:
                break
            if isinstance(statement, Definition):
                name, is_safe = statement.name, self._is_safe(statement)
            else:
                name = constant(statement)
                is_safe = name in self._needed
            maker = source.segment(statement)
            if name and is_safe and self.is_made_by(name, maker):
                rows.add(row)
                self._top.add(name)
        return rows

    def _is_unknown(self, statement: ast.stmt) -> bool:
        if not isinstance(statement, ast.ImportFrom) or statement.names[0].name != "*":
            return False
        return dict(makers(statement))["*"] not in sys.modules

    def _is_safe(self, statement: Definition) -> bool:
        needs = Needs(statement)
        return (
            not needs.is_odd
            and all(map(self._is_there, needs.names))
            and all(map(self._is_harmless, needs.calls))
        )

    def _is_there(self, name: str) -> bool:
        if name in self.star_names:
            return name not in self._makers and self._has_stars_on_top
        is_top = name in self._top and len(self._makers[name]) == 1
        return is_top or (name in BUILTINS and name not in self._makers)

    def _is_harmless(self, function: str) -> bool:
        """Whether what is called neither looks at what cells have made, nor changes it."""
        root, dot, rest = function.partition(".")
        if root in BUILTINS and root not in self._makers:
            return root not in _UNSAFE_BUILTINS
        [maker, *others] = self._makers.get(root, {""})
        words = maker.split()
        if others or not {"import"} & set(words):
            return False
        whole = f"{words[1]}.{words[3]}" if words[0] == "from" else words[1]
        return whole.partition(".")[0] in _SAFE_MODULES or f"{whole}{dot}{rest}" in _SAFE_CALLS


def makers(statement: Import) -> Iterator[tuple[str, str]]:
    """Each name that an import binds, and what tells it from another import of that name.

    Of ``*`` it is the module.
    """
    if isinstance(statement, ast.Import):
        for each in statement.names:
            root = each.name.partition(".")[0]
            name = each.asname or root
            yield name, f"import {each.name} as {name}" if each.asname else f"import {root}"
        return
    module = "." * statement.level + (statement.module or "")
    for each in statement.names:
        name = each.asname or each.name
        yield name, module if name == "*" else f"from {module} import {each.name} as {name}"


def star_names(module: str) -> frozenset[str]:
    """What ``from module import *`` brings, as far as this process has the module."""
    names = vars(sys.modules[module]) if module in sys.modules else {}
    return frozenset(names.get("__all__", [each for each in names if not each.startswith("_")]))


def _bound(source: str) -> set[str]:
    """What a statement binds or takes away, in its functions as well."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(source, "export", "exec", flags, dont_inherit=True)
    return bound_names(source) | set(_stored_in(code.co_consts))


def _stored_in(values: Iterable[object]) -> Iterator[str]:
    for code in values:
        if isinstance(code, CodeType):
            steps = dis.get_instructions(code)
            yield from (
                str(s.argval) for s in steps if s.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
            )
            yield from _stored_in(code.co_consts)


def constant(statement: ast.stmt) -> str:
    """The name that is given a value that nothing can change; empty if that is not what it does.

    >>> [constant(each) for each in ast.parse("a = 1, 'b'; b = [1]; c = d = 2").body]
    ['a', '', '']
    """
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
        return ""
    [target], value = statement.targets, statement.value
    parts = value.elts if isinstance(value, ast.Tuple) else [value]
    is_fixed = all(isinstance(each, ast.Constant) for each in parts)
    return target.id if is_fixed and isinstance(target, ast.Name) else ""


def names_in(trees: Iterable[ast.AST]) -> set[str]:
    """Every name that stands in them by itself."""
    return {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
