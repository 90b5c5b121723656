"""The rules for names and sums that ruff does not have."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VAGUE_NAMES = frozenset(
    ("each", "had", "its", "known", "left", "mine", "own", "said", "who", "whose")
)  # they do not say which value they stand for
ONE_LINE = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Lambda
BOOL_CALLS = {"all", "any", "bool", "callable", "hasattr", "isinstance", "issubclass"}

EXCEPTIONS = {  # a stored event and its file have these names
    "nbddp/record/heal/heal_report.py": {"left", "own"},
}


@cache
def trees() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for folder in ("nbddp", "tests", "tools", "benchmarks", "binder")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def bound_names(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield the names that a file binds, except in comprehensions and lambdas of one line."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ONE_LINE) and node.lineno == node.end_lineno:
            continue
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name, node
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node
            case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
                yield name, node
        pending += ast.iter_child_nodes(node)


def vague_names(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield names that do not say which value they stand for; left and right are two sides."""
    names = [(name.lstrip("_"), node) for name, node in bound_names(tree)]
    has_sides = any(name == "right" for name, _ in names)
    for name, node in names:
        if name in VAGUE_NAMES and not (name == "left" and has_sides):
            yield name, node


def is_condition(node: ast.AST) -> bool:
    match node:
        case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in BOOL_CALLS
    return False


def test_names_say_which_value_they_stand_for() -> None:
    found = [
        f"{path}:{node.lineno}: {name}"
        for path, tree in trees().items()
        for name, node in vague_names(tree)
        if name not in EXCEPTIONS.get(path, ())
    ]
    assert found == []


def test_each_exception_is_still_used() -> None:
    used = {path: {name for name, _ in vague_names(trees()[path])} for path in EXCEPTIONS}
    assert used == EXCEPTIONS


def test_no_condition_is_added_to_a_number() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.AugAssign)
        and isinstance(node.op, ast.Add | ast.Sub)
        and is_condition(node.value)
    ]
    assert found == []


def test_vague_names_and_conditions_are_found() -> None:
    source = """
import a as mine
def f(own, *, _known):
    def whose(): pass
    for each in own: self._left = each
    [each for each in own]; lambda said: said
    [
        said
        for said in own
    ]
    match own:
        case [who, *had]: pass
"""
    names = [name for name, _ in vague_names(ast.parse(source))]
    assert sorted(names) == sorted(
        ["mine", "own", "known", "whose", "each", "left", "said", "who", "had"]
    )
    assert not [*vague_names(ast.parse("left, right = 1, 2"))]
    sums = ["a == b", "not a", "a or b", "any(a)"]
    assert all(is_condition(ast.parse(each, mode="eval").body) for each in sums)
    assert not is_condition(ast.parse("len(a)", mode="eval").body)
