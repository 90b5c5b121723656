"""Calls that all ranks must make together, by their names."""

from __future__ import annotations

import ast
import re

from nbddp.checks.branches import has_rank_condition
from nbddp.checks.conditions import tests_at
from nbddp.checks.source import Source, once
from nbddp.checks.syntax import argument, may_be_true, names_in, passes_on_more

_GROUP_PLACES = {  # position of the ``group`` argument; None if there is no such argument
    **dict.fromkeys(("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce"), 2),
    **dict.fromkeys(("all_to_all", "broadcast", "broadcast_object_list"), 2),
    **dict.fromkeys(("gather", "gather_object", "reduce", "reduce_scatter"), 3),
    **dict.fromkeys(("reduce_scatter_tensor", "scatter", "scatter_object_list"), 3),
    **dict.fromkeys(("barrier", "monitored_barrier"), 0),
    "all_to_all_single": 4,
    "new_subgroups": 1,
    **dict.fromkeys(("new_group", "new_subgroups_by_enumeration"), None),
}
COLLECTIVES = frozenset(f"torch.distributed.{name}" for name in _GROUP_PLACES)
OURS = frozenset({"nbddp.all_reduce", "nbddp.all_gather"})
# calls that form groups of all ranks, and calls that write or read a distributed checkpoint
_OF_ALL_RANKS = re.compile(
    r"torch\.distributed\.(?:(?:\w+\.)*init_device_mesh"
    r"|checkpoint\.(?:\w+\.)*(?:save|load|async_save|save_state_dict|load_state_dict))"
)
# calls that all ranks with a shard of a tensor or a model must make together
_OF_SHARDS = re.compile(
    r"torch\.distributed\.(?:(?:\w+\.)*tensor\.(?:\w+\.)*distribute_(?:tensor|module)"
    r"|fsdp\.(?:\w+\.)*FullyShardedDataParallel\.(?:summon_full_params|full_optim_state_dict"
    r"|optim_state_dict|optim_state_dict_to_load|scatter_full_optim_state_dict))"
)
_OF_SHARDED_MODELS = re.compile(
    r"torch\.distributed\.checkpoint\.state_dict\.[gs]et_(?:model_|optimizer_)?state_dict"
)
_METHODS_OF_SHARDS = frozenset({"full_tensor", "consolidate_state_dict"})
_SHARDING = re.compile(r"fully_shard|FSDP|FullySharded|parallelize_module|distribute_module")
_NO_SHARDING = re.compile(r"\bDDP\b|DistributedDataParallel")


def short(name: str) -> str:
    """Return the name of a call as users type it.

    >>> short("torch.distributed.barrier"), short("nbddp.all_reduce")
    ('dist.barrier', 'nbddp.all_reduce')
    >>> short("torch.distributed.checkpoint.state_dict_saver.save")
    'dcp.save'
    """
    *room, last = name.split(".")
    if room[:1] != ["torch"]:
        return name
    if "checkpoint" in room and last in ("save", "load", "async_save"):
        return f"dcp.{last}"
    return f"dist.{last}" if room == ["torch", "distributed"] else last


def collective(source: Source, call: ast.Call) -> str:
    """Return the name of a collective of all ranks; empty for other calls.

    A collective in a group of some ranks does not count.
    """
    name = source.called(call)
    is_one = name in COLLECTIVES or name in OURS or _OF_ALL_RANKS.fullmatch(name)
    return name if is_one and _is_of_all(call, _GROUP_PLACES.get(name.rpartition(".")[2])) else ""


def _of_shards(source: Source, call: ast.Call) -> str:
    """Return the name of a call that all ranks with a shard must make; empty for other calls."""
    name, method = source.called(call), source.method(call)
    if _OF_SHARDS.fullmatch(name):
        return name
    if _OF_SHARDED_MODELS.fullmatch(name) or name.endswith("nn.utils.clip_grad_norm_"):
        is_clip = method == "clip_grad_norm_"
        return name if _takes_shards(source, call, may_guess=not is_clip) else ""
    is_method = method in _METHODS_OF_SHARDS and isinstance(call.func, ast.Attribute)
    is_clip = method == "clip_grad_norm_" and source.is_fsdp(source.owner(call))
    is_whole = method == "state_dict" and _gathers_state(source, source.owner(call))
    return f"{ast.unparse(call.func)}()" if is_method or is_clip or is_whole else ""


def _gathers_state(source: Source, name: str) -> bool:
    """Return whether ``state_dict()`` of a model gathers its shards, as in FSDP version 1."""
    made = [each for each in source.values(name) if isinstance(each, ast.Call)]
    is_first = any(source.called(each).endswith(".FullyShardedDataParallel") for each in made)
    return is_first and not re.search(r"(?:LOCAL|SHARDED)_STATE_DICT", source.text)


def _takes_shards(source: Source, call: ast.Call, *, may_guess: bool) -> bool:
    """Return whether a sharded model is among the arguments.

    With ``may_guess``, an unknown argument counts as one if the code shards models and has no DDP.
    """
    given = {name for each in call.args for name in names_in(each)}
    if any(map(source.is_fsdp, given)):
        return True
    known = any(map(source.kinds.get, given))
    is_likely = _SHARDING.search(source.text) and not _NO_SHARDING.search(source.text)
    return may_guess and not known and bool(is_likely)


def _is_of_all(call: ast.Call, place: int | None) -> bool:
    """Return whether all ranks must make this call, as far as its arguments tell."""
    alone = ("use_local_synchronization", "no_dist")
    if passes_on_more(call) or any(may_be_true(argument(call, each)) for each in alone):
        return False
    group = argument(call, "process_group") or argument(call, "group", place)
    is_default = isinstance(group, ast.Constant) and group.value is None
    return group is None or is_default or ast.unparse(group).endswith("group.WORLD")


@once
def meetings_of_shards(source: Source) -> dict[ast.Call, str]:
    """Return every call that all ranks with a shard of a tensor or a model must make together."""
    return {each: name for each in source.calls if (name := _of_shards(source, each))}


@once
def all_meetings(source: Source) -> list[tuple[ast.Call, str]]:
    """Return every call that all ranks must make, and every call of a function that makes one."""
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
    """Return whether only some ranks may make a call.

    It is under a condition on the rank, or the caller of its function decides which ranks make it.
    """
    function = source.function(call)
    if not isinstance(function, ast.FunctionDef):
        return has_rank_condition(source, call)
    given = {each.arg for each in function.args.args + function.args.kwonlyargs}
    takes_group = any("group" in each or "mesh" in each for each in given)
    asked = (names_in(test) for _, _, test in tests_at(source, call))
    return takes_group or any(given & names for names in asked) or has_rank_condition(source, call)
