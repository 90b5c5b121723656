"""Calls that all ranks must make together, by their names."""

from __future__ import annotations

import ast

from nbddp.checks.branches import has_rank_condition
from nbddp.checks.source import Source
from nbddp.checks.syntax import argument

COLLECTIVES = frozenset(
    f"torch.distributed.{name}"
    for name in (
        *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce"),
        *("all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list"),
        *("gather", "gather_object", "monitored_barrier", "new_group", "reduce"),
        *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
    )
)
OURS = frozenset({"nbddp.all_reduce", "nbddp.all_gather"})


def short(name: str) -> str:
    """As one types it.

    >>> short("torch.distributed.barrier"), short("nbddp.all_reduce")
    ('dist.barrier', 'nbddp.all_reduce')
    """
    return name.replace("torch.distributed.", "dist.")


def collective(source: Source, call: ast.Call) -> str:
    """Its name, if it is one of all ranks; a group of some ranks is their own affair."""
    name = source.called(call)
    if name not in COLLECTIVES and name not in OURS:
        return ""
    if name.endswith("barrier") and call.args:
        return ""
    group = argument(call, "group")
    is_all = group is None or (isinstance(group, ast.Constant) and group.value is None)
    return name if is_all else ""


def all_meetings(source: Source) -> list[tuple[ast.Call, str]]:
    """Every call that all ranks must make, those of functions that make one inside among them."""
    return source.once("meetings", lambda: _find_meetings(source))


def _find_meetings(source: Source) -> list[tuple[ast.Call, str]]:
    direct = [(each, name) for each in source.calls if (name := collective(source, each))]
    meets = _meeting_functions(source, direct)
    indirect = [
        (each, f"{name}()")
        for each in source.calls
        if isinstance(each.func, ast.Name) and (name := each.func.id) in meets
    ]
    return direct + indirect


def _meeting_functions(source: Source, direct: list[tuple[ast.Call, str]]) -> set[str]:
    found: set[str] = set()
    for call, _name in direct:
        function = source.function(call)
        is_plain = source.parents.get(function) is source.tree
        if is_plain and not _is_apart(source, call):
            found.add(getattr(function, "name", ""))
    return found


def _is_apart(source: Source, call: ast.Call) -> bool:
    """Whether some ranks come to it only; or a part of the ranks, by the function's own word."""
    function = source.function(call)
    takes_group = isinstance(function, ast.FunctionDef) and any(
        "group" in each.arg for each in function.args.args + function.args.kwonlyargs
    )
    return takes_group or has_rank_condition(source, call)
