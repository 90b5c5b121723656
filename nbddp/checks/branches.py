"""Conditions on the rank that code stands under, in whatever way they are written."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from nbddp.checks.conditions import depends_on_rank
from nbddp.checks.source import Source


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on the rank, and in which of its branches some code is.

    Attributes:
        node: where it stands; two with one ``node`` are of one condition.
        tests: what is asked there.
        branch: 0 where that is so, else 1.
    """

    node: ast.AST
    tests: tuple[ast.AST, ...]
    branch: int = 0

    @property
    def key(self) -> str:
        """The same for conditions that ask the same."""
        return " ".join(map(ast.dump, self.tests))

    def __str__(self) -> str:
        r"""As it is written.

        >>> source = Source("if rank:\n    pass\nelse:\n    dist.barrier()")
        >>> str(next(rank_conditions(source, source.calls[0])))
        'the `else` of `if rank`'
        """
        said = _said(self.node, self.tests)
        is_else = isinstance(self.node, ast.If | ast.IfExp) and self.branch
        return f"the `else` of {said}" if is_else else said


def rank_conditions(source: Source, node: ast.AST) -> Iterator[Condition]:
    """Those that it stands under in its function, from the inside out."""
    inner = node
    for outer in source.above(node):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        found = _condition(outer, inner)
        if found is not None:
            yield found
        inner = outer


def has_rank_condition(source: Source, node: ast.AST) -> bool:
    """Whether there is one."""
    return next(rank_conditions(source, node), None) is not None


def _condition(outer: ast.AST, inner: ast.AST) -> Condition | None:
    match outer:
        case ast.If(test=test, body=body) if inner is not test and depends_on_rank(test):
            return Condition(outer, (test,), int(inner not in body))
        case ast.IfExp(test=test, body=one) if inner is not test and depends_on_rank(test):
            return Condition(outer, (test,), int(inner is not one))
        case ast.While(test=test, body=body) if inner in body and depends_on_rank(test):
            return Condition(outer, (test,))
        case ast.BoolOp(values=values) if inner in values:
            before = tuple(values[: values.index(inner)])
            asked = [each for each in before if depends_on_rank(each)]
            return Condition(outer, before) if asked else None
    return None


def _said(node: ast.AST, tests: tuple[ast.AST, ...]) -> str:
    asked = ast.unparse(tests[0])
    match node:
        case ast.While():
            return f"`while {asked}`"
        case ast.BoolOp(op=ast.Or()):
            return f"`{' or '.join(map(ast.unparse, tests))} or ...`"
        case ast.BoolOp():
            return f"`{' and '.join(map(ast.unparse, tests))} and ...`"
        case _:
            return f"`if {asked}`"
