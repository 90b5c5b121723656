"""Find code that only some ranks reach."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile
from typing import Any

from nbddp.extensions.checks.source import CellSource, Scope, cached_per_source
from nbddp.extensions.checks.values import ITEM, MAX_DEPTH, bindings
from nbddp.record.heal.cell_syntax import last_name, names_in

_RANK = re.compile(r"(?:^|_)(?:rank|local_rank|global_rank|node_rank|get_rank|is_rank\w*)$|^RANK$")
# names that hold no rank of a process: counts, words for all ranks, ranks of matrices
_NOT_A_RANK = re.compile(
    r"(?i)(?:^|_)(?:all|any|each|every|per|n|nb|num|max|min|total|low|full|lora|matrix|svd)_rank$"
)
_MAIN = re.compile(r"(?i)(?:main|master|primary|chief|rank_?(?:zero|0)|leader)")
_IS_MAIN = re.compile(r"(?:is_)?(?:main|master|primary|chief)(?:_process|_rank|_node)?")
_RANKS_OF_WORLD = frozenset({"rank", "local_rank", "global_rank", "get_rank", "RANK", "is_rank0"})
_WORLD_SIZE_IS_ONE = re.compile(r"(?:.*\.)?_?(?:get_)?world_size(?:\(\))? (?:== 1|<= 1|< 2)")
# calls that may be in the rank's value, as in int(os.environ.get("RANK", 0)), and syntax
# that such a value does not have
_KEEPS_RANK = frozenset({"int", "bool", "get", "getenv", "environ", "is_initialized"})
_HOLDS_MORE = (ast.Dict, ast.List, ast.Tuple, ast.Set, ast.JoinedStr, ast.Lambda, ast.comprehension)
_EXITS = (ast.Return, ast.Break, ast.Continue)


def depends_on_rank(test: ast.expr) -> bool:
    """Return whether a condition is true on some ranks only.

    Two kinds of conditions do not count: a test of whether a rank exists at all, as in
    ``rank != -1``, and a condition that also requires a world size of 1.

    >>> depends_on_rank(ast.parse("rank == 0", mode="eval").body)
    True
    >>> depends_on_rank(ast.parse("args.local_rank != -1", mode="eval").body)
    False
    >>> depends_on_rank(ast.parse("rank == 0 and world_size == 1", mode="eval").body)
    False
    """
    if any(
        is_true and _WORLD_SIZE_IS_ONE.fullmatch(text)
        for text, is_true, _test in _split_condition(test, is_true=True)
    ):
        return False
    return _mentions_rank(test)


def _mentions_rank(node: ast.AST) -> bool:
    """Return whether a node mentions the rank, except to test whether a rank exists at all."""
    if isinstance(node, ast.Compare) and _asks_if_distributed(node):
        return False
    inner = ast.iter_child_nodes(node)
    return _is_rank(node) or _is_main(node) or any(map(_mentions_rank, inner))


@cached_per_source
def with_ranks(
    source: CellSource, test: ast.expr, *, may_guess: bool = False, depth: int = MAX_DEPTH
) -> ast.expr:
    """Return an expression in which the value of the rank replaces each name that holds it.

    A name such as ``rank`` that holds an item of a list is replaced by the name ``item``.

    Args:
        source: the code.
        test: the expression.
        may_guess: whether it is enough that one value of a name is the rank; else all its values
            must be the rank or constants.
        depth: the number of names to follow, one after the other.
    """
    names = [each for each in ast.walk(test) if isinstance(each, ast.Name | ast.Attribute)]
    find = partial(_held, source, test, may_guess=may_guess, depth=depth - 1)
    held = {ast.unparse(each): find(each) for each in names if depth}
    return _Replacement(held).visit(deepcopy(test)) if any(held.values()) else test


class _Replacement(ast.NodeTransformer):
    def __init__(self, values: dict[str, ast.expr | None]) -> None:
        self._values = values

    def visit(self, node: ast.AST) -> Any:
        is_name = isinstance(node, ast.Name | ast.Attribute)
        held = self._values.get(ast.unparse(node)) if is_name else None
        return held or self.generic_visit(node)


def _held(
    source: CellSource, test: ast.expr, name: ast.expr, *, may_guess: bool, depth: int
) -> ast.expr | None:
    """Return what replaces a name that holds the rank, or seems to; None to keep the name."""
    values = bindings(source, name, source.function(test))
    if _is_rank(name) or _is_main(name):
        others = [last_name(e.func) for e in values if isinstance(e, ast.Call)]
        is_other = all(e is ITEM for e in values) or any(map(_NOT_A_RANK.search, others))
        return ast.Name("item") if values and is_other else None
    if not values and source.given_kinds.get(last_name(name)) == "rank":
        return ast.Name("rank")
    followed = [e and with_ranks(source, e, may_guess=may_guess, depth=depth) for e in values]
    ranks = [each for each in followed if each is not None and _is_rank_value(each)]
    others_are_constants = all(
        value in ranks or (isinstance(value, ast.Constant) and value is not ITEM)
        for value in followed
    )
    return ranks[0] if ranks and (may_guess or others_are_constants) else None


def _is_rank_value(value: ast.expr) -> bool:
    """Return whether a value is the rank or is computed from it, without calls of other code."""
    for node in ast.walk(value):
        called = getattr(node, "func", node.value if isinstance(node, ast.Subscript) else None)
        is_plain = called is None or last_name(called) in _KEEPS_RANK or _is_rank(called)
        if not is_plain or isinstance(node, _HOLDS_MORE):
            return False
    return _mentions_rank(value)


def picks_one_of_all(source: CellSource, test: ast.expr) -> bool:
    """Return whether a condition is certainly true on one rank only, or on all ranks but one.

    A rank in a mesh dimension or in a subgroup does not count: several processes have the same
    one. A condition with an ``or`` may be true on all ranks.

    >>> source = CellSource("")
    >>> tests = (ast.parse(text, mode="eval").body for text in ("rank == 0", "tp_rank"))
    >>> [picks_one_of_all(source, test) for test in tests]
    [True, False]
    """
    test = with_ranks(source, test)
    orders = ast.Or | ast.Lt | ast.LtE | ast.Gt | ast.GtE | ast.In | ast.NotIn
    if any(isinstance(each, orders) for each in ast.walk(test)):
        return False
    of_groups = {
        id(node.func)
        for node in ast.walk(test)
        if isinstance(node, ast.Call)
        and (node.args or ast.unparse(node.func).endswith((".rank", "get_local_rank")))
    }
    words = [each for each in ast.walk(test) if _is_rank(each) and id(each) not in of_groups]
    names = {(last_name(each) or "RANK").lstrip("_") for each in words}
    return names <= _RANKS_OF_WORLD and (bool(words) or any(map(_is_main, ast.walk(test))))


def may_mean_one_rank(test: ast.AST) -> bool:
    """Return whether any word of a condition suggests that it is for one rank."""
    words = names_in(test) | {
        node.value
        for node in ast.walk(test)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return any(_MAIN.search(each) or "rank" in each.lower() or each == "gpu" for each in words)


def _is_rank(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return node.value in ("RANK", "LOCAL_RANK")
    name = last_name(node)
    return bool(_RANK.search(name)) and not _NOT_A_RANK.search(name)


def _is_main(node: ast.AST) -> bool:
    return bool(_IS_MAIN.fullmatch(last_name(node)))


def _asks_if_distributed(test: ast.Compare) -> bool:
    """Return whether a comparison only tests for a rank, as ``rank != -1`` or ``rank is None``.

    ``rank >= 0`` counts, and so does a test of membership in a list without 0.
    """
    operator, right = test.ops[0], test.comparators[0]
    if isinstance(operator, ast.In | ast.NotIn):  # a list with 0, as in (-1, 0), selects a rank
        items = right.elts if isinstance(right, ast.List | ast.Tuple | ast.Set) else []
        return "0" not in map(ast.unparse, items)
    value = ast.unparse(right)
    is_sign_test = value == "0" and isinstance(operator, ast.GtE | ast.Lt)
    return value == "-1" or is_sign_test or isinstance(operator, ast.Is | ast.IsNot)


def is_guarded(source: CellSource, node: ast.AST) -> bool:
    """Return whether a condition that may mean one rank is around a node, or exits before it."""
    return any(
        may_mean_one_rank(with_ranks(source, test, may_guess=True))
        for inner, outer in source.steps_out(node)
        for test in (*_deciding_tests(outer), *_exit_tests_before(outer, inner))
    )


def _deciding_tests(outer: ast.AST) -> list[ast.expr]:
    """Return the expressions that decide whether the code in a node runs."""
    match outer:
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            return [test]
        case ast.BoolOp(values=tests) | ast.FunctionDef(decorator_list=tests):
            return tests
        case ast.Match(subject=subject):
            return [subject]
        case ast.match_case(guard=ast.expr() as guard):
            return [guard]
    return []


def _exit_tests_before(outer: ast.AST, inner: ast.AST) -> Iterator[ast.expr]:
    """Yield the conditions before ``inner`` in its block under which the code leaves the block."""
    for statement in takewhile(lambda statement: statement is not inner, _block(outer, inner)):
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], _EXITS):
            yield statement.test


def is_called_guarded(source: CellSource, node: ast.AST, depth: int = 3) -> bool:
    """Return whether a node is guarded, or every call of its function is."""
    if is_guarded(source, node):
        return True
    function = source.function(node)
    if isinstance(function, ast.Module) or not depth:
        return False
    return _is_always_guarded(source, function.name, depth)


@cached_per_source
def _is_always_guarded(source: CellSource, name: str, depth: int) -> bool:
    """Return whether only one rank calls a function, judging by its name or by all its calls."""
    if may_mean_one_rank(ast.Name(name)):
        return True
    calls = [each for each in source.calls_of(name) if source.owner(each) not in source.aliases]
    return bool(calls) and all(is_called_guarded(source, each, depth - 1) for each in calls)


def early_exits(source: CellSource) -> Iterator[tuple[ast.If, ast.AST]]:
    """Yield conditions on the rank that exit a function or a loop, with that function or loop."""
    for node in source.nodes_of(ast.If):
        last = node.body[-1]
        if not node.orelse and isinstance(last, _EXITS) and varies(source, node.test):
            target = _left_by(source, last)
            if target and target is not source.tree:
                yield node, target


def _left_by(source: CellSource, statement: ast.stmt) -> ast.AST | None:
    """Return the loop, function or module that a statement leaves."""
    if isinstance(statement, ast.Return | ast.Raise):
        return source.function(statement)
    return next(iter(source.loops(statement)), None)


def exit_target(source: CellSource, node: ast.AST, outer: ast.AST) -> ast.AST | None:
    """Return the loop or function that the code leaves at the end of a node's block.

    Blocks outside of ``outer`` do not count. Return None if the code leaves nothing.
    """
    for inner, statement in source.steps_out(node):
        for last in _block(statement, inner)[-1:]:
            if isinstance(last, (*_EXITS, ast.Raise)):
                return _left_by(source, last)
        if statement is outer:
            break
    return None


def _block(outer: ast.AST, inner: ast.AST) -> list[Any]:
    """Return the body or ``else`` that a statement is in; empty if it is in neither."""
    blocks = (getattr(outer, field, None) for field in ("body", "orelse"))
    return next((each for each in blocks if isinstance(each, list) and inner in each), [])


def are_exclusive(source: CellSource, one: ast.AST, other: ast.AST) -> bool:
    """Return whether two nodes are in branches that exclude each other."""
    others = {(text, is_true) for text, is_true, _ in tests_at(source, other)}
    return any((text, not is_true) in others for text, is_true, _ in tests_at(source, one))


def tests_at(source: CellSource, node: ast.AST) -> Iterator[tuple[str, bool, ast.expr]]:
    """Yield the conditions that hold at a node in its function: text, whether it is true, code.

    They are the conditions around the node, and those before it under which the code leaves.
    """
    for inner, outer in source.steps_out(node):
        for test in _exit_tests_before(outer, inner):
            yield from _split_condition(test, is_true=False)
        if isinstance(outer, Scope):
            break
        if isinstance(outer, ast.If | ast.IfExp) and inner is not outer.test:
            body = outer.body if isinstance(outer.body, list) else [outer.body]
            yield from _split_condition(outer.test, is_true=inner in body)
        elif isinstance(outer, ast.Match) and isinstance(inner, ast.match_case):
            yield f"{ast.unparse(outer.subject)}: {ast.unparse(inner.pattern)}", True, outer.subject


def _split_condition(test: ast.expr, *, is_true: bool) -> Iterator[tuple[str, bool, ast.expr]]:
    """Split a condition: the parts of a true ``and`` are true, those of a false ``or`` are false.

    >>> test = ast.parse("not a and b is None", mode="eval").body
    >>> [(text, is_true) for text, is_true, _ in _split_condition(test, is_true=True)]
    [('a', False), ('b', False)]
    """
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _split_condition(operand, is_true=not is_true)
        case ast.BoolOp(op=operator, values=values) if isinstance(operator, ast.And) is is_true:
            for value in values:
                yield from _split_condition(value, is_true=is_true)
        case ast.Compare(operand, [ast.Is() | ast.IsNot() as operator], [ast.Constant(value=None)]):
            yield ast.unparse(operand), is_true == isinstance(operator, ast.IsNot), test
        case _:
            yield ast.unparse(test), is_true, test


def may_exclude(source: CellSource, one: ast.AST, other: ast.AST) -> bool:
    """Return whether a process may run only one of two nodes.

    Conditions on the rank are ignored. Two nodes certainly exclude each other if one needs a
    condition to be true and the other needs it to be false. They may exclude each other if each
    has a condition that the other lacks.
    """
    texts, others = (
        {
            (text, is_true)
            for text, is_true, test in tests_at(source, node)
            if not varies(source, test)
        }
        for node in (one, other)
    )
    return bool(texts - others and others - texts)


@dataclass(frozen=True)
class RankCondition:
    """A condition on the rank, and the branch that contains some code.

    Attributes:
        node: the statement with the condition; both branches have the same ``node``.
        tests: the tested expressions.
        branch: 0 if the condition is true in the branch, else 1.
    """

    node: ast.AST
    tests: tuple[ast.expr, ...]
    branch: int = 0

    @cached_property
    def code(self) -> list[str]:
        """The tested expressions as code."""
        return [*map(ast.unparse, self.tests)]

    def picks_one_of_all(self, source: CellSource) -> bool:
        """Return whether :func:`picks_one_of_all` holds for each tested expression."""
        return all(picks_one_of_all(source, each) for each in self.tests)

    def __str__(self) -> str:
        r"""Return the condition as code in backticks, for a message.

        >>> source = CellSource("if rank:\n    pass\nelse:\n    dist.barrier()")
        >>> str(next(rank_conditions(source, source.calls[0])))
        'the `else` of `if rank`'
        """
        match self.node:
            case ast.While():
                return f"`while {self.code[0]}`"
            case ast.BoolOp(op=operator):
                word = " or " if isinstance(operator, ast.Or) else " and "
                return f"`{word.join([*self.code, '...'])}`"
        return f"{'the `else` of ' if self.branch else ''}`if {self.code[0]}`"


def varies(source: CellSource, test: ast.expr) -> bool:
    """Return whether a condition is true on some ranks only, whatever the rank's name is."""
    return depends_on_rank(with_ranks(source, test))


def rank_conditions(source: CellSource, node: ast.AST) -> Iterator[RankCondition]:
    """Yield the conditions on the rank around a node in its function, from the inside out."""
    for inner, outer in source.steps_out(node):
        if isinstance(outer, Scope):
            return
        if found := _condition(source, outer, inner):
            yield found


def _condition(source: CellSource, outer: ast.AST, inner: ast.AST) -> RankCondition | None:
    match outer:
        case ast.If(test=test, body=body) if inner is not test and varies(source, test):
            return RankCondition(outer, (test,), int(inner not in body))
        case ast.IfExp(test=test, body=one) if inner is not test and varies(source, test):
            return RankCondition(outer, (test,), int(inner is not one))
        case ast.While(test=test, body=body) if inner in body and varies(source, test):
            return RankCondition(outer, (test,))
        case ast.BoolOp(values=values) if inner in values:
            before = tuple(values[: values.index(inner)])
            asked = [each for each in before if varies(source, each)]
            return RankCondition(outer, before) if asked else None
    return None
