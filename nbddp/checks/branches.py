"""Conditions on the rank that code stands under, in whatever way they are written."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from nbddp.checks.conditions import depends_on_rank
from nbddp.checks.source import Source

_SIZES = re.compile(r"(?i)(?:^|_)(?:n|nb|num|max|total|world|lora)_")  # num_rank is no rank
_COMPREHENSION = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on the rank, and in which of its branches some code is.

    Attributes:
        node: where it stands; two with one ``node`` are of one condition.
        tests: what is asked there.
        branch: 0 where that is so; of a ``match`` the number of the case.
        is_loop: whether ranks come to it another number of times, and not just some of them.
    """

    node: ast.AST
    tests: tuple[ast.AST, ...]
    branch: int = 0
    is_loop: bool = False

    @property
    def key(self) -> str:
        """The same for conditions that ask the same."""
        return " ".join(map(ast.dump, self.tests))

    @property
    def effect(self) -> str:
        """What it means for code that all ranks must come to."""
        if self.is_loop:
            return "not all ranks come to it as often"
        return "the other ranks do not come to it"

    def __str__(self) -> str:
        r"""As it is written.

        >>> source = Source("match rank:\n    case 0: dist.barrier()")
        >>> str(next(rank_conditions(source, source.calls[0])))
        '`case 0` of `match rank`'
        """
        said = _said(self.node, self.tests, self.branch)
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
        case ast.For(iter=given, body=body) if inner in body and _as_often_as_rank(given):
            return Condition(outer, (given,), is_loop=True)
        case ast.BoolOp(values=values) if inner in values:
            before = tuple(values[: values.index(inner)])
            asked = [each for each in before if depends_on_rank(each)]
            return Condition(outer, before) if asked else None
        case ast.Match(cases=cases) if isinstance(inner, ast.match_case):
            return _case(outer, cases.index(inner), inner)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return _of_comprehension(outer, inner)
    return None


def _case(outer: ast.Match, number: int, inner: ast.match_case) -> Condition | None:
    """A case, unless it is one of those that ask whether there are several ranks at all."""
    if inner.guard is not None and depends_on_rank(inner.guard):
        return Condition(outer, (outer.subject, inner.guard), number)
    patterns = {ast.unparse(each.pattern) for each in outer.cases}
    if patterns & {"-1", "None"} or not depends_on_rank(outer.subject):
        return None
    return Condition(outer, (outer.subject,), number)


def _of_comprehension(outer: _COMPREHENSION, inner: ast.AST) -> Condition | None:
    """What decides how often its element is reckoned."""
    generators = outer.generators
    if isinstance(inner, ast.comprehension):
        generators = generators[: generators.index(inner)]
    asked = [test for each in generators for test in each.ifs if depends_on_rank(test)]
    often = [each.iter for each in generators if _as_often_as_rank(each.iter)]
    if not asked and not often:
        return None
    return Condition(outer, tuple(asked or often), is_loop=not asked)


def _as_often_as_rank(given: ast.AST) -> bool:
    """Whether a loop over it goes round another number of times on each rank.

    A rank's part of a range has a step, or both its ends depend on the rank.

    >>> _as_often_as_rank(ast.parse("range(rank + 1)", mode="eval").body)
    True
    >>> _as_often_as_rank(ast.parse("range(rank, 100, world_size)", mode="eval").body)
    False
    """
    is_range = isinstance(given, ast.Call) and ast.unparse(given.func) == "range"
    if not isinstance(given, ast.Call) or not is_range or not 1 <= len(given.args) <= 2:
        return False
    ends = [each for each in given.args if depends_on_rank(each)]
    return len(ends) == 1 and not any(
        _SIZES.search(each.id) for each in ast.walk(ends[0]) if isinstance(each, ast.Name)
    )


def _said(node: ast.AST, tests: tuple[ast.AST, ...], branch: int) -> str:
    asked = ast.unparse(tests[0])
    match node:
        case ast.While():
            return f"`while {asked}`"
        case ast.For(target=target):
            return f"`for {ast.unparse(target)} in {asked}`"
        case ast.BoolOp(op=ast.Or()):
            return f"`{' or '.join(map(ast.unparse, tests))} or ...`"
        case ast.BoolOp():
            return f"`{' and '.join(map(ast.unparse, tests))} and ...`"
        case ast.Match(cases=cases):
            case, guard = cases[branch], "".join(f" if {ast.unparse(each)}" for each in tests[1:])
            return f"`case {ast.unparse(case.pattern)}{guard}` of `match {asked}`"
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return f"`{asked}` of a comprehension"
        case _:
            return f"`if {asked}`"
