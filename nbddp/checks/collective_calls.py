"""Calls that all ranks must make together, by their names."""

from __future__ import annotations

import ast

from nbddp.checks.branches import has_rank_condition
from nbddp.checks.conditions import tests_at
from nbddp.checks.source import Source
from nbddp.checks.syntax import argument, may_be_true, names_in, passes_on_more

_GROUP_PLACES = {  # of torch's collectives, among their arguments
    **dict.fromkeys(("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce"), 2),
    **dict.fromkeys(("all_to_all", "broadcast", "broadcast_object_list"), 2),
    **dict.fromkeys(("gather", "gather_object", "reduce", "reduce_scatter"), 3),
    **dict.fromkeys(("reduce_scatter_tensor", "scatter", "scatter_object_list"), 3),
    **dict.fromkeys(("barrier", "monitored_barrier"), 0),
    "all_to_all_single": 4,
    "new_group": None,
}
COLLECTIVES = frozenset(f"torch.distributed.{name}" for name in _GROUP_PLACES)
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
    is_one = name in COLLECTIVES or name in OURS
    return name if is_one and _is_of_all(call, _GROUP_PLACES.get(name.rpartition(".")[2])) else ""


def _is_of_all(call: ast.Call, place: int | None) -> bool:
    """Return whether all ranks must make this call, as far as its arguments tell."""
    if passes_on_more(call) or may_be_true(argument(call, "use_local_synchronization")):
        return False
    group = argument(call, "group", place)
    is_default = isinstance(group, ast.Constant) and group.value is None
    return group is None or is_default or ast.unparse(group).endswith("group.WORLD")


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
    """Return whether some ranks only make it, or the function's caller decides which ones do."""
    function = source.function(call)
    if not isinstance(function, ast.FunctionDef):
        return has_rank_condition(source, call)
    given = {each.arg for each in function.args.args + function.args.kwonlyargs}
    takes_group = any("group" in each or "mesh" in each for each in given)
    asked = (names_in(test) for _, _, test in tests_at(source, call))
    return takes_group or any(given & names for names in asked) or has_rank_condition(source, call)
