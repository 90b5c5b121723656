"""What a function or class needs when it is made, as against when it is called."""

from __future__ import annotations

import ast

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

# they run when a class is made of another, and may look at anything
_HOOKS = frozenset({"__init_subclass__", "__set_name__", "__class_getitem__", "__mro_entries__"})


class Needs(ast.NodeVisitor):
    """Reads it off a definition.

    Attributes:
        names: it reads them, and does not bind them before.
        calls: it calls these; decorators too.
        is_odd: it does what nobody can tell from its text.
    """

    def __init__(self, statement: Definition) -> None:
        self.names: set[str] = set()
        self.calls: set[str] = set()
        self.is_odd = False
        self._own: set[str] = set()
        self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Its decorators, defaults and annotations."""
        self.is_odd |= node.name in _HOOKS
        self._decorated(node)
        self.visit(node.args)
        if node.returns is not None:
            self.visit(node.returns)
        self._own.add(node.name)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - ast's name

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """All that runs when it is made: nearly all of it."""
        self._decorated(node)
        for each in (*node.bases, *node.keywords, *node.body):
            self.visit(each)
        self.is_odd |= any(isinstance(each, ast.Name) and each.id == "type" for each in node.bases)
        self._own.add(node.name)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Its defaults."""
        self.visit(node.args)

    def visit_Assign(self, node: ast.Assign) -> None:
        """The value is there before the name."""
        self.visit(node.value)
        for each in node.targets:
            self.visit(each)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """The value is there before the name."""
        self.visit(node.annotation)
        if node.value is not None:
            self.visit(node.value)
            self.visit(node.target)

    def visit_Name(self, node: ast.Name) -> None:
        """What is bound here is not asked of others."""
        if not isinstance(node.ctx, ast.Load):
            self._own.add(node.id)
        elif node.id not in self._own:
            self.names.add(node.id)
            self.is_odd |= node.id in ("os", "sys")  # an earlier cell may have changed them

    def visit_Call(self, node: ast.Call) -> None:
        """Who is called."""
        self._called(node.func)
        self.generic_visit(node)

    def visit_Await(self, _node: ast.Await) -> None:
        """It needs a loop."""
        self.is_odd = True

    def _decorated(self, node: Definition) -> None:
        for decorator in node.decorator_list:
            if not isinstance(decorator, ast.Call):
                self._called(decorator)
            self.visit(decorator)

    def _called(self, function: ast.expr) -> None:
        text = ast.unparse(function)
        if text.partition(".")[0] not in self._own:
            self.calls.add(text)
