"""The code of a cell or a script as input of rules: its syntax, and the kinds of its variables."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cached_property, wraps
from itertools import pairwise, takewhile
from typing import Any, Concatenate, ParamSpec, TypeVar

from nbddp.record.heal.cell_syntax import last_name, plain_names, without_ipython

# names that a cell has without an import
PRESET_ALIASES = {"torch": "torch", "dist": "torch.distributed", "nbddp": "nbddp"}
_KIND_OF_CALL = {
    "DistributedDataParallel": "ddp",
    "FullyShardedDataParallel": "fsdp",
    "fully_shard": "fsdp",
    "DataLoader": "loader",
    "DistributedSampler": "sampler",
    "GradScaler": "scaler",
}
_SILENCING_COMMENT = re.compile(r"#\s*nbddp:\s*ok\s+(ND\d+(?:\s*,\s*ND\d+)*)")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Loop = ast.For | ast.AsyncFor | ast.While
T = TypeVar("T", bound=ast.AST)
P = ParamSpec("P")
V = TypeVar("V")


def cached_per_source(
    find: Callable[Concatenate[CellSource, P], V],
) -> Callable[Concatenate[CellSource, P], V]:
    """Cache a function's results in its source: rules compute the same for many nodes."""

    @wraps(find)
    def found(source: CellSource, /, *args: P.args, **options: P.kwargs) -> V:
        key = (find, *args, *options.values())
        if key not in source.cache:
            source.cache[key] = find(source, *args, **options)
        value: V = source.cache[key]
        return value

    return found


class CellSource:
    """The code of a cell or a script.

    Args:
        text: the code as it was typed, including magics.
        kinds: the kinds of variables from other cells: ``ddp``, ``loader`` ...
        first_line: the line number in the editor of the first line of ``text``.
        aliases: the full names of modules and functions that other cells have imported.
        is_cell: whether this is a cell of a worker group, so that every line runs on all ranks.

    Raises:
        SyntaxError: the code is not valid Python.
    """

    def __init__(
        self,
        text: str,
        kinds: Mapping[str, str] | None = None,
        *,
        first_line: int = 1,
        is_cell: bool = True,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.text = text
        self.is_cell = is_cell
        self._line_offset = first_line - 1
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        plain = without_ipython(text)
        self.tree: ast.Module = compile(plain, "cell", "exec", flags, dont_inherit=True)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = []
        self._nodes_by_type: dict[type[ast.AST], list[Any]] = defaultdict(list)
        self._visit()
        self.calls = self.nodes_of(ast.Call)
        self._assignments = self.nodes_of(ast.Assign)
        self.aliases = dict(aliases or {}) | self._aliases()
        self._names = {each: self.dotted(each.func) for each in self.calls}
        self._calls_by_method: dict[str, list[ast.Call]] = defaultdict(list)
        self._calls_by_function: dict[ast.AST, list[ast.Call]] = defaultdict(list)
        for call in self.calls:
            self._calls_by_method[self.method(call)].append(call)
            self._calls_by_function[self.function(call)].append(call)
        self.cache: dict[Hashable, Any] = {}  # results of cached functions
        self.given_kinds = dict(kinds or {})
        self.kinds = self.given_kinds | self._kinds_assigned_here()

    def _visit(self) -> None:
        """Collect every node, in the order of the text, and its parent."""
        pending: list[ast.AST] = [self.tree]
        while pending:
            node = pending.pop()
            self.nodes.append(node)
            self._nodes_by_type[type(node)].append(node)
            inner = list(ast.iter_child_nodes(node))
            self.parents.update(dict.fromkeys(inner, node))
            pending += reversed(inner)

    def nodes_of(self, kind: type[T]) -> list[T]:
        """Return all nodes of a kind, in the order of the text."""
        return self._nodes_by_type[kind]

    def line(self, node: ast.AST) -> int:
        """Return the first line of a node, in the editor's line numbers."""
        return int(getattr(node, "lineno", 0)) + self._line_offset

    def last_line(self, node: ast.AST) -> int:
        """Return the last line of a node, in the editor's line numbers."""
        return int(getattr(node, "end_lineno", self.text.count("\n") + 1)) + self._line_offset

    # ---- names

    def _aliases(self) -> dict[str, str]:
        found = dict(PRESET_ALIASES) if self.is_cell else {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    package = alias.name.partition(".")[0]
                    found[alias.asname or package] = alias.name if alias.asname else package
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return found

    def dotted(self, node: ast.AST) -> str:
        """Return the full dotted name of an expression, with imports resolved; empty if none.

        >>> source = CellSource("from torch import distributed as d; d.barrier()")
        >>> source.dotted(source.calls[0].func)
        'torch.distributed.barrier'
        """
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.aliases.get(node.id, node.id), *reversed(parts)])

    def called_name(self, call: ast.Call) -> str:
        """Return the full name of the called function."""
        return self._names[call]

    def line_of(self, method: str) -> int:
        """Return the line of the first call of a function or method; 0 if there is none."""
        return next((self.line(each) for each in self.calls_of(method)), 0)

    def is_ddp(self, name: str) -> bool:
        """Return whether a name is a DDP model."""
        return self.kinds.get(name, "").startswith("ddp")

    def is_fsdp(self, name: str) -> bool:
        """Return whether a name is an FSDP model, with parameters sharded over the ranks."""
        return self.kinds.get(name, "").startswith("fsdp")

    def method(self, call: ast.Call) -> str:
        """Return the last part of the called name: a function or a method."""
        return last_name(call.func)

    def calls_of(self, method: str) -> list[ast.Call]:
        """Return the calls of a function, or of a method of any object."""
        return self._calls_by_method.get(method, [])

    def owner(self, call: ast.Call) -> str:
        """Return the name of the object of a method call: ``model`` for ``model.eval()``."""
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            return call.func.value.id
        return ""

    def kind_of_call(self, call: ast.Call) -> str:
        """Return the kind of object that a call creates; empty if it is unknown."""
        name = self.called_name(call)
        if name == "nbddp.prepare":
            return "ddp"
        if name == "nbddp.loader":
            return "nbddp loader"
        last = name.rpartition(".")[2]
        if name.startswith("torch") and last in _KIND_OF_CALL:
            return _KIND_OF_CALL[last]
        return "optimizer" if name.startswith("torch.optim.") and last[:1].isupper() else ""

    def _kinds_assigned_here(self) -> dict[str, str]:
        """Return the kinds of names that this code assigns; the last assignment counts."""
        found: dict[str, str] = {}
        for name, values in self._values.items():
            for value in values:
                if isinstance(value, ast.Call) and (kind := self.kind_of_call(value)):
                    found[name] = kind
        for call in self.calls_of("fully_shard"):
            if call.args and isinstance(call.args[0], ast.Name):
                found[call.args[0].id] = self.kind_of_call(call)
        return found

    def creating_call(self, name: str) -> ast.Call | None:
        """Return the call that creates the value of a name, if the name is assigned once."""
        found = self.values(name)
        return found[0] if len(found) == 1 and isinstance(found[0], ast.Call) else None

    def values(self, name: str) -> list[ast.expr]:
        """Return all values that ``=`` assigns to a name, in the order of the text."""
        return self._values.get(name, [])

    @cached_property
    def _values(self) -> dict[str, list[ast.expr]]:
        found: dict[str, list[ast.expr]] = {}
        for node in self._assignments:
            for name in {each.id for each in node.targets if isinstance(each, ast.Name)}:
                found.setdefault(name, []).append(node.value)
        return found

    @cached_property
    def is_distributed(self) -> bool:
        """Whether the code uses DDP: it has a DDP model, or calls DDP."""
        return any(map(self.is_ddp, self.kinds)) or "ddp" in map(self.kind_of_call, self.calls)

    @cached_property
    def assigned(self) -> frozenset[str]:
        """The names that ``=`` or a ``for`` loop assigns, but not those of ``with``."""
        targets: list[ast.AST] = [each for node in self._assignments for each in node.targets]
        targets += [each.target for each in self.nodes_of(ast.For)]
        return frozenset().union(*map(plain_names, targets))

    @cached_property
    def shared_names(self) -> dict[str, int]:
        """The names that the code shares with other cells, each with the line of its first use.

        >>> CellSource("f = lambda x: x + [y for y in z]").shared_names["z"]
        1
        """
        bound: dict[ast.AST, set[str]] = {
            function: {given.arg for given in ast.walk(function.args) if isinstance(given, ast.arg)}
            for function in self.functions
        }
        for node in self.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.setdefault(self.function(node), set()).add(node.id)
            elif isinstance(node, Function):
                bound.setdefault(self.function(node), set()).add(node.name)
        found: dict[str, int] = {}
        for node in self.nodes:
            if isinstance(node, ast.Name) and node.id not in found:
                around = [
                    ancestor
                    for ancestor in self.ancestors(node)
                    if ancestor in bound and ancestor is not self.tree
                ]
                if not any(node.id in bound[each] for each in around):
                    found[node.id] = self.line(node)
        return found

    # ---- the surroundings and contents of a node

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, from the inside out."""
        while (outer := self.parents.get(node)) is not None:
            yield outer
            node = outer

    def ancestors_in_function(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node in its function or lambda, from the inside out."""
        return takewhile(lambda each: not isinstance(each, Scope), self.ancestors(node))

    def steps_out(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield each pair of a node and the node around it, from the inside out."""
        return pairwise((node, *self.ancestors(node)))

    def function(self, node: ast.AST) -> Function | ast.Module:
        """Return the function around a node, or the module."""
        for ancestor in self.ancestors(node):
            if isinstance(ancestor, Function):
                return ancestor
        return self.tree

    def calls_in(self, function: ast.AST) -> list[ast.Call]:
        """Return the calls in a function or at module level, in the order of the text."""
        return self._calls_by_function.get(function, [])

    def loops(self, node: ast.AST) -> list[Loop]:
        """Return the loops around a node in its function, from the inside out."""
        return [each for each in self.ancestors_in_function(node) if isinstance(each, Loop)]

    def calls_inside(self, node: ast.AST) -> Iterator[ast.Call]:
        """Yield the calls inside a node, except in functions that are defined there."""
        pending: list[ast.AST] = [node]
        while pending:
            current = pending.pop()
            if isinstance(current, ast.Call):
                yield current
            inner = ast.iter_child_nodes(current)
            pending += [each for each in inner if not isinstance(each, Scope | ast.ClassDef)]

    @cached_property
    def functions(self) -> list[Function]:
        """The functions that the code defines, in the order of the text."""
        return [each for each in self.nodes if isinstance(each, Function)]

    # ---- silencing comments

    def is_silenced(self, rule: str, line: int) -> bool:
        """Return whether a comment silences a rule: on this line, or alone on any other line."""
        return any(
            rule in rules and (is_of_all or number == line)
            for number, is_of_all, rules in self._silencing_comments
        )

    @cached_property
    def _silencing_comments(self) -> list[tuple[int, bool, list[str]]]:
        """The line of each silencing comment, whether the line has no code, and the rules."""
        found = []
        for number, text in enumerate(self.text.split("\n"), start=1 + self._line_offset):
            comment = _SILENCING_COMMENT.search(text) if "nbddp:" in text else None
            if comment is not None:
                is_of_all = text.lstrip().startswith("#")
                found.append((number, is_of_all, re.findall(r"ND\d+", comment[1])))
        return found
