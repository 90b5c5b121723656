"""Rules about evaluation: training mode, and numbers of one rank that are reported for all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from nbddp.extensions.checks.collective_rules import COLLECTIVES, is_without_gradients
from nbddp.extensions.checks.registry import Hit, rule
from nbddp.extensions.checks.source import CellSource
from nbddp.extensions.checks.training_rules import training_loops
from nbddp.record.heal.cell_syntax import argument, names_in, plain_names

_GATHERS = re.compile(
    r"(?i)reduce|gather|synchroni[sz]e|meter|metric|all_|sync|broadcast|accelerat|evaluator"
)


@rule("ND132")
def _evaluates_in_training_mode(source: CellSource) -> Iterator[Hit]:
    trainers = {name for name, kind in source.kinds.items() if kind.endswith(" in training")}
    if "eval(" in source.text or ".train(" in source.text:
        return
    for call in source.calls:
        name = call.func.id if isinstance(call.func, ast.Name) else source.owner(call)
        if name not in trainers or source.method(call) not in (name, "module"):
            continue
        if source.loops(call) and is_without_gradients(source, call):
            effect = "its dropout, or batch norm, is active"
            yield call, f"{name} is evaluated in training mode: {effect}."
            return


def _evaluation_sums(source: CellSource) -> Iterator[tuple[str, ast.For, ast.AugAssign]]:
    """Yield sums in evaluation loops over a loader that divides the data among the ranks."""
    training = training_loops(source)
    for node in source.nodes_of(ast.AugAssign):
        loop = next(iter(source.loops(node)), None)
        if not isinstance(node.target, ast.Name) or not isinstance(loop, ast.For):
            continue
        names = plain_names(loop.iter)
        if loop not in training and any(_is_divided_loader(source, each) for each in names):
            yield node.target.id, loop, node


def _is_divided_loader(source: CellSource, name: str) -> bool:
    """Return whether a name is a loader that divides the data among the ranks."""
    kind = source.kinds.get(name, "")
    if kind.startswith("loader "):
        return kind == "loader divided"
    made = source.creating_call(name)
    if made is None or source.kind_of_call(made) != "loader":
        return False
    sampler = argument(made, "sampler", 3)
    if isinstance(sampler, ast.Name):
        return source.kinds.get(sampler.id) == "sampler"
    return isinstance(sampler, ast.Call) and source.kind_of_call(sampler) == "sampler"


@rule("ND133")
def _count_of_one_rank(source: CellSource) -> Iterator[Hit]:
    if _may_combine_ranks(source):
        return
    for name, loop, added in _evaluation_sums(source):
        if not re.search(r"(?i)right|correct|total|acc|hits|loss|seen", name):
            continue
        for call in source.calls_in(source.function(loop)):
            is_after = call.lineno > max(loop.lineno, added.lineno)
            says_whose = "rank" in ast.unparse(call)
            if _reports(source, call) and is_after and name in names_in(call) and not says_whose:
                yield call, f"{name} is reported, but it counts only one rank's own share."
                return


def _reports(source: CellSource, call: ast.Call) -> bool:
    return source.called_name(call) in ("print", "nbddp.log") or (
        source.method(call) in ("add_scalar", "log")
    )


def _may_combine_ranks(source: CellSource) -> bool:
    """Return whether the code may combine the ranks' numbers, perhaps in an imported function."""
    return any(
        source.called_name(call) in COLLECTIVES or _GATHERS.search(source.called_name(call) or "")
        for call in source.calls
    ) or any(_GATHERS.search(each.name) for each in source.functions)


@rule("ND134")
def _mean_of_means(source: CellSource) -> Iterator[Hit]:
    loops = {name: loop for name, loop, node in _evaluation_sums(source) if _is_of_batch(node)}
    for node in source.nodes_of(ast.BinOp):
        name = node.left.id if isinstance(node.left, ast.Name) else ""
        if name not in loops or not isinstance(node.op, ast.Div):
            continue
        if _is_length_of_loop(node.right, loops[name]) and _is_reduced(source, node):
            effect = "gives the last, smaller batch the weight of a whole one"
            yield node, f"{name} adds up means of batches; `/ {ast.unparse(node.right)}` {effect}."


def _is_length_of_loop(divisor: ast.expr, loop: ast.For) -> bool:
    """Return whether a divisor is the ``len()`` of the loop's iterable."""
    match divisor:
        case ast.Call(func=ast.Name("len"), args=[measured, *_]):
            return ast.unparse(measured) in ast.unparse(loop.iter)
    return False


def _is_of_batch(node: ast.AugAssign) -> bool:
    """Return whether a loss is added without the number of its samples as a factor."""
    text = ast.unparse(node.value)
    is_loss = "loss" in f"{ast.unparse(node.target)} {text}"
    return is_loss and "*" not in text and "len(" not in text


def _is_reduced(source: CellSource, node: ast.AST) -> bool:
    """Return whether the mean is reduced over the ranks right away."""
    match source.parents[node]:
        case ast.Call() as outer:
            return bool(re.search(r"all_reduce|reduce_mean|tensor", source.called_name(outer)))
        case ast.Assign(targets=[ast.Name(name), *_], lineno=line):
            return any(
                "reduce" in source.called_name(call)
                and name in names_in(call)
                and call.lineno >= line
                for call in source.calls
            )
    return False
