"""The rule about a DDP or FSDP model that some ranks call alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from nbddp.checks.conditions import Condition, picks_one_of_all, rank_conditions
from nbddp.checks.registry import Hit, rule
from nbddp.checks.source import Source, once
from nbddp.checks.syntax import argument, is_false, passes_on_more, plain_names


@rule("ND102")
def _ddp_of_some_ranks(source: Source) -> Iterator[Hit]:
    for call in source.calls:
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        is_fsdp = source.is_fsdp(name)
        if not (is_fsdp or source.is_ddp(name)) or _is_wrapped_later(source, name, call):
            continue
        is_quiet = not is_fsdp and is_without_gradients(source, call)
        if is_quiet and not _has_buffers(source, name):
            continue
        for condition in rank_conditions(source, call):
            if is_fsdp and not all(map(picks_one_of_all, condition.tests)):
                continue
            if _may_join(source, condition.node) or _all_branches_call(source, condition, name):
                continue
            kind = "an FSDP model" if is_fsdp else "a DDP model"
            line = source.line(condition.node)
            effect = "its forward and backward need all ranks"
            if is_quiet:
                effect = "the first forward after a training step broadcasts buffers to all ranks"
            yield call, f"{name}(), {kind}, is called under {condition} (line {line}): {effect}."
            break


def _has_buffers(source: Source, name: str) -> bool:
    """Return whether DDP sends buffers of this model in forward, as it does for batch norm.

    It does so in each forward with gradients, and in the first one without (torch 2.13.0,
    ``DistributedDataParallel._post_forward``).
    """
    if "buffers" in source.given.get(name, ""):
        return True
    return any(
        not passes_on_more(each)
        and argument(each, "broadcast_buffers") is None
        and _has_norm(source, each)
        for each in _wraps(source, name)
    )


def _has_norm(source: Source, value: ast.AST, depth: int = 3) -> bool:
    """Return whether an expression, or the code of a name in it, mentions batch norm."""
    if re.search(r"BatchNorm|batchnorm", ast.unparse(value)):
        return True
    names = plain_names(value)
    made: list[ast.AST] = [each for name in names for each in source.values(name)]
    made += [each for each in source.every(ast.ClassDef) if each.name in names]
    return depth > 0 and any(
        _has_norm(source, each, depth - 1) for each in made if each is not value
    )


def _is_wrapped_later(source: Source, name: str, call: ast.Call) -> bool:
    """Return whether the code wraps the model in DDP only after this call of the model."""
    wraps = _wraps(source, name)
    return bool(wraps) and all(
        each.lineno > call.lineno
        and source.function(each) is source.function(call)
        and not set(source.loops(each)) & set(source.loops(call))
        for each in wraps
    )


@once
def _wraps(source: Source, name: str) -> list[ast.Call]:
    """Return the calls that wrap what has this name in DDP."""
    made = [each for each in source.values(name) if isinstance(each, ast.Call)]
    return [each for each in made if source.kind_of_call(each) == "ddp"]


@once
def _may_join(source: Source, node: ast.AST, depth: int = 3) -> bool:
    """Return whether a ``Join`` may cover a node, so that finished ranks still take part.

    A ``Join`` around the node or around a call of its function counts. So does one that is
    created outside of a ``with`` statement, because it may be entered anywhere.
    """
    joins = _joins(source)
    if not joins or None in joins:
        return bool(joins)
    if any(outer in joins for outer in source.above(node)):
        return True
    function = source.function(node)
    if isinstance(function, ast.Module) or not depth:
        return False
    return any(_may_join(source, each, depth - 1) for each in source.calls_of(function.name))


@once
def _joins(source: Source) -> set[ast.AST | None]:
    """Return the ``with`` statements of each ``Join``, and None for a ``Join`` without one."""
    found: set[ast.AST | None] = set()
    for call in source.calls_of("Join") + source.calls_of("join"):
        item = next((each for each in source.above(call) if isinstance(each, ast.withitem)), None)
        is_of_model = source.is_ddp(source.owner(call)) or (item is not None and not call.args)
        if is_false(argument(call, "enable")):
            continue
        if source.method(call) == "Join" or is_of_model:
            found.add(source.parents[item] if item is not None else None)
    return found


def _all_branches_call(source: Source, condition: Condition, name: str) -> bool:
    node = condition.node
    return isinstance(node, ast.If) and all(
        any(
            isinstance(call.func, ast.Name) and call.func.id == name
            for each in branch
            for call in source.within(each)
        )
        for branch in (node.body, node.orelse)
    )


def is_without_gradients(source: Source, call: ast.Call) -> bool:
    """Return whether a call is under ``no_grad`` or the like: DDP averages no gradients there."""
    for outer in source.above(call):
        if isinstance(outer, ast.With | ast.AsyncWith):
            entered = " ".join(ast.unparse(each.context_expr) for each in outer.items)
            if "no_grad" in entered or "inference_mode" in entered:
                return True
        if isinstance(outer, ast.FunctionDef):
            return any(
                "grad" in ast.unparse(e) or "infer" in ast.unparse(e) for e in outer.decorator_list
            )
    return False
