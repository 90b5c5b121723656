"""A cell, or a script, as rules see it: its syntax, and what is known of its names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from nbddp.checks.syntax import without_ipython

# what is in a cell without an import
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
Loop = ast.For | ast.AsyncFor | ast.While
T = TypeVar("T", bound=ast.AST)
P = ParamSpec("P")
V = TypeVar("V")


def cached_per_source(
    find: Callable[Concatenate[CellSource, P], V],
) -> Callable[Concatenate[CellSource, P], V]:
    """Make a function keep its results with each source: rules ask the same of many places."""

    @wraps(find)
    def found(source: CellSource, /, *args: P.args, **options: P.kwargs) -> V:
        key = (find, *args)
        if key not in source.cache:
            source.cache[key] = find(source, *args, **options)
        value: V = source.cache[key]
        return value

    return found


class CellSource:
    """Some code.

    Args:
        text: as it was typed, magics and all.
        kinds: what is known of names that the code has not made itself: ``ddp``, ``loader`` ...
        first_line: the editor's line that ``text`` begins on.
        aliases: the whole names of what other cells have imported.
        is_cell: whether there is a worker group around it, so that every line runs on all ranks.

    Raises:
        SyntaxError: it is no Python.
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
        self.first_line = first_line
        self._line_offset = first_line - 1
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        self.tree: ast.Module = compile(
            without_ipython(text), "cell", "exec", flags, dont_inherit=True
        )
        self.parents: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = []
        self._nodes_by_type: dict[type[ast.AST], list[Any]] = defaultdict(list)
        self._visit()
        self.calls = self.nodes_of(ast.Call)
        self._assignments = self.nodes_of(ast.Assign)
        self.aliases = dict(aliases or {}) | self._aliases()
        self._names = {each: self.dotted(each.func) for each in self.calls}
        self.cache: dict[Hashable, Any] = {}  # of functions under ``cached_per_source``
        self.given_kinds = dict(kinds or {})
        self.kinds = self.given_kinds | self._kinds_assigned_here()

    def _visit(self) -> None:
        """Note every node, in the order of the text, and its parent."""
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
        """The editor's line that it begins on."""
        return int(getattr(node, "lineno", 0)) + self._line_offset

    def last_line(self, node: ast.AST) -> int:
        """The editor's line that it ends on."""
        return int(getattr(node, "end_lineno", self.text.count("\n") + 1)) + self._line_offset

    # ---- names

    def _aliases(self) -> dict[str, str]:
        found = dict(PRESET_ALIASES) if self.is_cell else {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for each in node.names:
                    if each.asname:
                        found[each.asname] = each.name
                    else:
                        found[each.name.partition(".")[0]] = each.name.partition(".")[0]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for each in node.names:
                    found[each.asname or each.name] = f"{node.module}.{each.name}"
        return found

    def dotted(self, node: ast.AST) -> str:
        """The whole name of what stands here, with what imports say of it; empty if it has none.

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
        """The whole name of what is called."""
        return self._names[call]

    def line_of(self, method: str) -> int:
        """Where this is called first, 0 if it is not."""
        return next((self.line(each) for each in self.calls_of(method)), 0)

    def is_ddp(self, name: str) -> bool:
        """Whether it is known to be a DDP model."""
        return self.kinds.get(name, "").startswith("ddp")

    def is_fsdp(self, name: str) -> bool:
        """Whether it is known to be an FSDP model, whose parameters are sharded over the ranks."""
        return self.kinds.get(name, "").startswith("fsdp")

    def method(self, call: ast.Call) -> str:
        """The last part of what is called, whatever it belongs to."""
        if isinstance(call.func, ast.Attribute):
            return call.func.attr
        return call.func.id if isinstance(call.func, ast.Name) else ""

    def calls_of(self, method: str) -> list[ast.Call]:
        """The calls of this function, or method of whatever."""
        return self._calls_by(CellSource.method).get(method, [])

    def owner(self, call: ast.Call) -> str:
        """The plain name before the dot of what is called: ``model`` of ``model.eval()``."""
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            return call.func.value.id
        return ""

    def kind_of_call(self, call: ast.Call) -> str:
        """What it makes, if that is known."""
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
        """What the code's own assignments make of names, in its order."""
        found: dict[str, str] = {}
        for node in self._assignments:
            if isinstance(node.value, ast.Call):
                kind = self.kind_of_call(node.value)
                for name in (each.id for each in node.targets if isinstance(each, ast.Name)):
                    if kind:
                        found[name] = kind
        for call in self.calls_of("fully_shard"):
            if call.args and isinstance(call.args[0], ast.Name):
                found[call.args[0].id] = self.kind_of_call(call)
        return found

    def creating_call(self, name: str) -> ast.Call | None:
        """The call that has made what is called so, if the code does it once."""
        found = self.values(name)
        return found[0] if len(found) == 1 and isinstance(found[0], ast.Call) else None

    def values(self, name: str) -> list[ast.expr]:
        """All that a name is given by ``=``, in the order of the text."""
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
        """Whether DDP is at work here: by name, or in what a script imports and calls."""
        return any(map(self.is_ddp, self.kinds)) or "ddp" in map(self.kind_of_call, self.calls)

    @cached_property
    def assigned(self) -> frozenset[str]:
        """The names that are given a value by ``=``, or by a loop; not by ``with``."""
        targets: list[ast.AST] = [each for node in self._assignments for each in node.targets]
        targets += [each.target for each in self.nodes_of(ast.For)]
        return frozenset(
            each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)
        )

    @cached_property
    def shared_names(self) -> dict[str, int]:
        """The names that the code has in common with other cells, and where each is first used.

        >>> CellSource("f = lambda x: x + [y for y in z]").shared_names["z"]
        1
        """
        own: dict[ast.AST, set[str]] = {
            each: {given.arg for given in ast.walk(each.args) if isinstance(given, ast.arg)}
            for each in self.functions
        }
        for node in self.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.setdefault(self.function(node), set()).add(node.id)
            elif isinstance(node, Function):
                own.setdefault(self.function(node), set()).add(node.name)
        found: dict[str, int] = {}
        for node in self.nodes:
            if isinstance(node, ast.Name) and node.id not in found:
                around = [
                    each for each in self.ancestors(node) if each in own and each is not self.tree
                ]
                if not any(node.id in own[each] for each in around):
                    found[node.id] = self.line(node)
        return found

    # ---- places

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """What it stands in, from the inside out."""
        while (outer := self.parents.get(node)) is not None:
            yield outer
            node = outer

    def function(self, node: ast.AST) -> Function | ast.Module:
        """The function that it stands in, or all of the code."""
        for each in self.ancestors(node):
            if isinstance(each, Function):
                return each
        return self.tree

    def calls_in(self, function: ast.AST) -> list[ast.Call]:
        """The calls in a function, or in none, in the order of the text."""
        return self._calls_by(CellSource.function).get(function, [])

    @cached_per_source
    def _calls_by(
        self, of: Callable[[CellSource, ast.Call], Hashable]
    ) -> dict[Hashable, list[ast.Call]]:
        found: dict[Hashable, list[ast.Call]] = {}
        for each in self.calls:
            found.setdefault(of(self, each), []).append(each)
        return found

    def loops(self, node: ast.AST) -> list[Loop]:
        """The loops of its function that it stands in, from the inside out."""
        found: list[Loop] = []
        for each in self.ancestors(node):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                break
            if isinstance(each, Loop):
                found.append(each)
        return found

    def calls_inside(self, node: ast.AST) -> Iterator[ast.Call]:
        """The calls inside it, those of functions that are only defined there left out."""
        pending: list[ast.AST] = [node]
        while pending:
            each = pending.pop()
            if isinstance(each, ast.Call):
                yield each
            skipped = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
            pending += [
                inner for inner in ast.iter_child_nodes(each) if not isinstance(inner, skipped)
            ]

    @cached_property
    def functions(self) -> list[Function]:
        """The functions that are defined here, in the order of the text."""
        return [each for each in self.nodes if isinstance(each, Function)]

    # ---- silence

    def is_silenced(self, rule: str, line: int) -> bool:
        """Whether a comment allows it: on its line, or for all of the code on a line of its own."""
        return any(
            rule in rules and (is_of_all or number == line)
            for number, is_of_all, rules in self._silencing_comments
        )

    @cached_property
    def _silencing_comments(self) -> list[tuple[int, bool, list[str]]]:
        """Of each such comment its line, whether that has nothing else, and the rules."""
        found = []
        for number, text in enumerate(self.text.split("\n"), start=1 + self._line_offset):
            comment = _SILENCING_COMMENT.search(text) if "nbddp:" in text else None
            if comment is not None:
                is_of_all = text.lstrip().startswith("#")
                found.append((number, is_of_all, re.findall(r"ND\d+", comment[1])))
        return found
