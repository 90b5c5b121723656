"""Rules about calls that all ranks must make together: collectives, and models under DDP."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from nbddp.extensions.checks.conditions import (
    RankCondition,
    early_exits,
    exit_target,
    may_exclude,
    picks_one_of_all,
    rank_conditions,
    tests_at,
)
from nbddp.extensions.checks.registry import Hit, rule
from nbddp.extensions.checks.source import CellSource, cached_per_source
from nbddp.extensions.checks.values import are_numbers, is_in_set_order
from nbddp.record.heal.cell_syntax import (
    argument_text,
    has_star_arguments,
    names_in,
    plain_names,
)

_GROUP_POSITIONS = {  # position of the ``group`` argument; None if there is no such argument
    **dict.fromkeys(("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce"), 2),
    **dict.fromkeys(("all_to_all", "broadcast", "broadcast_object_list"), 2),
    **dict.fromkeys(("gather", "gather_object", "reduce", "reduce_scatter"), 3),
    **dict.fromkeys(("reduce_scatter_tensor", "scatter", "scatter_object_list"), 3),
    **dict.fromkeys(("barrier", "monitored_barrier"), 0),
    "all_to_all_single": 4,
    "new_subgroups": 1,
    **dict.fromkeys(("new_group", "new_subgroups_by_enumeration"), None),
}
COLLECTIVES = frozenset(f"torch.distributed.{name}" for name in _GROUP_POSITIONS)
NBDDP_COLLECTIVES = frozenset({"nbddp.all_reduce", "nbddp.all_gather"})
# calls that form groups of all ranks, and calls that write or read a distributed checkpoint
_WORLD_CALLS = re.compile(
    r"torch\.distributed\.(?:(?:\w+\.)*init_device_mesh"
    r"|checkpoint\.(?:\w+\.)*(?:save|load|async_save|save_state_dict|load_state_dict))"
)
# calls that all ranks with a shard of a tensor or a model must make together
_SHARD_CALLS = re.compile(
    r"torch\.distributed\.(?:(?:\w+\.)*tensor\.(?:\w+\.)*distribute_(?:tensor|module)"
    r"|fsdp\.(?:\w+\.)*FullyShardedDataParallel\.(?:summon_full_params|full_optim_state_dict"
    r"|optim_state_dict|optim_state_dict_to_load|scatter_full_optim_state_dict))"
)
# of variables that are trainers with all ranks: RankFacts.aliases
_TRAINER_CALLS = re.compile(
    r"(?:transformers|lightning|pytorch_lightning)\.Trainer\."
    r"(?:train|evaluate|predict|fit|validate|test)"
)
_SHARDED_MODEL_CALLS = re.compile(
    r"torch\.distributed\.checkpoint\.state_dict\.[gs]et_(?:model_|optimizer_)?state_dict"
)
_SHARD_METHODS = frozenset({"full_tensor", "consolidate_state_dict"})
_SHARDING = re.compile(r"fully_shard|FSDP|FullySharded|parallelize_module|distribute_module")
_NO_SHARDING = re.compile(r"\bDDP\b|DistributedDataParallel")


def short_name(name: str) -> str:
    """Return the name of a call as users type it.

    >>> short_name("torch.distributed.barrier"), short_name("nbddp.all_reduce")
    ('dist.barrier', 'nbddp.all_reduce')
    >>> short_name("torch.distributed.checkpoint.state_dict_saver.save")
    'dcp.save'
    """
    *modules, last = name.split(".")
    if modules[:1] != ["torch"]:
        return name
    if "checkpoint" in modules and last in ("save", "load", "async_save"):
        return f"dcp.{last}"
    return f"dist.{last}" if modules == ["torch", "distributed"] else last


def collective_name(source: CellSource, call: ast.Call) -> str:
    """Return the name of a collective of all ranks; empty for other calls.

    A collective in a group of some ranks does not count.
    """
    name = source.called_name(call)
    is_collective = name in COLLECTIVES or name in NBDDP_COLLECTIVES or _WORLD_CALLS.fullmatch(name)
    position = _GROUP_POSITIONS.get(name.rpartition(".")[2])
    return name if is_collective and _is_for_all_ranks(call, position) else ""


def _shard_call_name(source: CellSource, call: ast.Call) -> str:
    """Return the name of a call that all ranks with a shard must make; empty for other calls.

    A call of a library's trainer counts, too: the ranks share the data, and gather the results.
    """
    name, method = source.called_name(call), source.method(call)
    if _TRAINER_CALLS.fullmatch(name):
        return f"{ast.unparse(call.func)}()"
    if _SHARD_CALLS.fullmatch(name):
        return name
    if _SHARDED_MODEL_CALLS.fullmatch(name) or name.endswith("nn.utils.clip_grad_norm_"):
        is_clip = method == "clip_grad_norm_"
        return name if _takes_shards(source, call, may_guess=not is_clip) else ""
    is_method = method in _SHARD_METHODS and isinstance(call.func, ast.Attribute)
    is_clip = method == "clip_grad_norm_" and source.is_fsdp(source.owner(call))
    is_whole = method == "state_dict" and _gathers_state(source, source.owner(call))
    return f"{ast.unparse(call.func)}()" if is_method or is_clip or is_whole else ""


def _gathers_state(source: CellSource, name: str) -> bool:
    """Return whether ``state_dict()`` of a model gathers its shards, as in FSDP version 1."""
    made = [each for each in source.values(name) if isinstance(each, ast.Call)]
    is_fsdp1 = any(source.called_name(each).endswith(".FullyShardedDataParallel") for each in made)
    return is_fsdp1 and not re.search(r"(?:LOCAL|SHARDED)_STATE_DICT", source.text)


def _takes_shards(source: CellSource, call: ast.Call, *, may_guess: bool) -> bool:
    """Return whether a sharded model is among the arguments.

    With ``may_guess``, an unknown argument counts as one if the code shards models and has no DDP.
    """
    argument_names = {name for each in call.args for name in names_in(each)}
    if any(map(source.is_fsdp, argument_names)):
        return True
    has_kind = any(map(source.kinds.get, argument_names))
    is_likely = _SHARDING.search(source.text) and not _NO_SHARDING.search(source.text)
    return may_guess and not has_kind and bool(is_likely)


def _is_for_all_ranks(call: ast.Call, position: int | None) -> bool:
    """Return whether all ranks must make this call, as far as its arguments tell."""
    switches = {argument_text(call, each) for each in ("use_local_synchronization", "no_dist")}
    group = argument_text(call, "process_group") or argument_text(call, "group", position) or "None"
    is_of_world = group.endswith(("None", "group.WORLD"))
    return is_of_world and switches <= {"", "False"} and not has_star_arguments(call)


@cached_per_source
def shard_calls(source: CellSource) -> dict[ast.Call, str]:
    """Return every call that all ranks with a shard of a tensor or a model must make together."""
    return {each: name for each in source.calls if (name := _shard_call_name(source, each))}


@cached_per_source
def collective_calls(source: CellSource) -> list[tuple[ast.Call, str]]:
    """Return every call that all ranks must make, and every call of a function that makes one."""
    direct = [(each, name) for each in source.calls if (name := collective_name(source, each))]
    functions = [source.function(each) for each, _ in direct if not _may_skip_ranks(source, each)]
    collective_functions = {
        function.name
        for function in functions
        if not isinstance(function, ast.Module) and source.parents[function] is source.tree
    }
    indirect = [
        (call, f"{name}()")
        for call in source.calls
        if isinstance(call.func, ast.Name) and (name := call.func.id) in collective_functions
    ]
    return direct + indirect


def _may_skip_ranks(source: CellSource, call: ast.Call) -> bool:
    """Return whether only some ranks may make a call.

    It is under a condition on the rank, or the caller of its function decides which ranks make it.
    """
    function = source.function(call)
    if not isinstance(function, ast.FunctionDef):
        return any(rank_conditions(source, call))
    parameters = {each.arg for each in function.args.args + function.args.kwonlyargs}
    takes_group = any("group" in each or "mesh" in each for each in parameters)
    asked = (names_in(test) for _, _, test in tests_at(source, call))
    depends_on_caller = takes_group or any(parameters & names for names in asked)
    return depends_on_caller or any(rank_conditions(source, call))


@rule("ND101")
def _collective_on_some_ranks(source: CellSource) -> Iterator[Hit]:
    sharded_calls = shard_calls(source)
    calls = collective_calls(source) + list(sharded_calls.items())
    conditions = [
        [
            condition
            for condition in rank_conditions(source, call)
            if call not in sharded_calls or condition.picks_one_of_all(source)
        ]
        for call, _ in calls
    ]
    all_conditions = [each for of_call in conditions for each in of_call]
    for (call, name), of_call in zip(calls, conditions, strict=True):
        for condition in of_call:
            has_partner = _other_ranks_match(source, condition, all_conditions)
            if not has_partner and not _other_ranks_match_below(source, call, condition.node):
                where = f"{condition} (line {source.line(condition.node)})"
                yield call, f"{short_name(name)} is under {where}: the other ranks do not reach it."
                break


def _other_ranks_match_below(source: CellSource, call: ast.Call, outer: ast.AST) -> bool:
    """Return whether the other ranks make a collective after ``outer``.

    The ranks that make ``call`` leave before it, by ``return``, ``raise``, ``break`` or
    ``continue``.
    """
    target = exit_target(source, call, outer)
    if target is None:
        return False
    first, last = source.last_line(outer), source.last_line(target)
    function = source.function(call)
    return any(
        first < source.line(other) <= last and source.function(other) is function
        for other, _ in collective_calls(source)
    )


def _other_ranks_match(
    source: CellSource, condition: RankCondition, conditions: list[RankCondition]
) -> bool:
    """Return whether the other ranks make a collective in another branch or condition."""
    around = {*source.ancestors(condition.node)}
    for other in conditions:
        if other.node is condition.node:
            if other.branch != condition.branch:
                return True
        elif other.code != condition.code and other.node not in around:
            around_other = source.ancestors(other.node)
            if condition.node not in around_other:
                return True
    return False


@rule("ND103")
def _after_early_exit(source: CellSource) -> Iterator[Hit]:
    sharded_calls = shard_calls(source)
    calls = collective_calls(source) + list(sharded_calls.items())
    ancestors_of_calls = _all_ancestors(source, calls)
    by_function: dict[ast.AST, list[tuple[int, str, ast.Call]]] = defaultdict(list)
    for call, name in calls:
        if not any(rank_conditions(source, call)):
            by_function[source.function(call)].append((source.line(call), name, call))
    for condition, target in early_exits(source):
        if condition in ancestors_of_calls:
            continue
        first, last = source.line(condition.body[-1]), source.last_line(target)
        candidates = by_function[source.function(condition)]
        for line, name, call in sorted(candidates, key=lambda each: each[:2]):
            if (
                first < line <= last
                and (call not in sharded_calls or picks_one_of_all(source, condition.test))
                and not may_exclude(source, condition.body[-1], call)
            ):
                leaves = type(condition.body[-1]).__name__.lower()
                code = f"`if {ast.unparse(condition.test)}: {leaves}`"
                where = f"{code} (line {source.line(condition)})"
                effect = "the ranks that have left do not reach it"
                yield line, f"{short_name(name)} comes after {where}: {effect}."
                break


def _all_ancestors(source: CellSource, calls: list[tuple[ast.Call, str]]) -> set[ast.AST]:
    """Return all nodes that contain any of these calls."""
    return {outer for call, _ in calls for outer in source.ancestors(call)}


@rule("ND104")
def _collective_in_except(source: CellSource) -> Iterator[Hit]:
    calls = collective_calls(source)
    ancestors_of_calls = _all_ancestors(source, calls)
    for call, name in calls:
        for outer in source.ancestors_in_function(call):
            if isinstance(outer, ast.ExceptHandler):
                attempt = source.parents[outer]
                is_tried = isinstance(attempt, ast.Try) and any(
                    statement in ancestors_of_calls
                    for statement in (*attempt.body, *attempt.orelse)
                )
                has_partner = is_tried or _other_ranks_match_below(source, call, attempt)
                catches_import = outer.type is not None and "Import" in ast.unparse(outer.type)
                if not has_partner and not catches_import:
                    effect = "only the ranks that had the error reach it"
                    yield call, f"{short_name(name)} is in an `except`: {effect}."
                break


@rule("ND105")
def _missing_wait(source: CellSource) -> Iterator[Hit]:
    for call in source.calls:
        name = source.called_name(call)
        is_alone = isinstance(source.parents.get(call), ast.Expr)
        starts = name in COLLECTIVES and argument_text(call, "async_op") == "True"
        if is_alone and (starts or name in ("torch.distributed.isend", "torch.distributed.irecv")):
            handle = f"the handle of this {short_name(name)}"
            yield call, f"{handle} is dropped, so no code can wait for it."


@rule("ND107")
def _summed_gradients(source: CellSource) -> Iterator[Hit]:
    for call in source.calls:
        if source.called_name(call) != "torch.distributed.all_reduce" or not call.args:
            continue
        text = ast.unparse(call.args[0])
        is_sum = (argument_text(call, "op", 1) or "SUM").endswith("SUM")
        is_of_gradients = text.endswith((".grad", ".grad.data"))
        if is_of_gradients and is_sum and not _divides(source, source.function(call)):
            yield call, f"the ranks' gradients in {text} are summed, but not divided."


@cached_per_source
def _divides(_source: CellSource, function: ast.AST) -> bool:
    """Return whether anything in a function divides."""
    return any(
        isinstance(node, ast.Div)
        or getattr(node, "attr", "") in ("div_", "div", "mul_", "true_divide_")
        for node in ast.walk(function)
    )


@rule("ND108")
def _collective_in_order_of_set(source: CellSource) -> Iterator[Hit]:
    for call, name in collective_calls(source):
        function = source.function(call)
        for inner, outer in source.steps_out(call):
            if outer is function:
                break
            loops = getattr(outer, "generators", [outer])  # of a comprehension
            for loop in loops if inner not in loops else []:
                is_loop = isinstance(loop, ast.For | ast.comprehension) and inner is not loop.iter
                if (
                    is_loop
                    and is_in_set_order(source, loop.iter, function)
                    and not are_numbers(loop.target)
                ):
                    where = f"a loop over the set {ast.unparse(loop.iter)}"
                    yield call, f"{short_name(name)} is in {where}, which has no fixed order."


@rule("ND102")
def _model_on_some_ranks(source: CellSource) -> Iterator[Hit]:
    for call in source.calls:
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        is_fsdp = source.is_fsdp(name)
        if not (is_fsdp or source.is_ddp(name)) or _is_wrapped_later(source, name, call):
            continue
        is_quiet = not is_fsdp and is_without_gradients(source, call)
        if is_quiet and not _has_buffers(source, name):
            continue
        for condition in rank_conditions(source, call):
            if (
                (is_fsdp and not condition.picks_one_of_all(source))
                or _may_be_in_join(source, condition.node)
                or _all_branches_call(source, condition, name)
            ):
                continue
            kind = "an FSDP model" if is_fsdp else "a DDP model"
            line = source.line(condition.node)
            effect = "its forward and backward need all ranks"
            if is_quiet:
                effect = "the first forward after a training step broadcasts buffers to all ranks"
            yield call, f"{name}(), {kind}, is called under {condition} (line {line}): {effect}."
            break


def _has_buffers(source: CellSource, name: str) -> bool:
    """Return whether DDP sends buffers of this model in forward, as it does for batch norm.

    It does so in each forward with gradients, and in the first one without (torch 2.13.0,
    ``DistributedDataParallel._post_forward``).
    """
    if "buffers" in source.given_kinds.get(name, ""):
        return True
    return any(
        not has_star_arguments(call)
        and not argument_text(call, "broadcast_buffers")
        and _has_norm(source, call)
        for call in _wrapping_calls(source, name)
    )


def _has_norm(source: CellSource, value: ast.AST, depth: int = 3) -> bool:
    """Return whether an expression, or the code of a name in it, mentions batch norm."""
    if re.search(r"BatchNorm|batchnorm", ast.unparse(value)):
        return True
    names = plain_names(value)
    made: list[ast.AST] = [each for name in names for each in source.values(name)]
    made += [each for each in source.nodes_of(ast.ClassDef) if each.name in names]
    return depth > 0 and any(
        _has_norm(source, part, depth - 1) for part in made if part is not value
    )


def _is_wrapped_later(source: CellSource, name: str, call: ast.Call) -> bool:
    """Return whether the code wraps the model in DDP only after this call of the model."""
    wraps = _wrapping_calls(source, name)
    return bool(wraps) and all(
        wrap.lineno > call.lineno
        and source.function(wrap) is source.function(call)
        and not set(source.loops(wrap)) & set(source.loops(call))
        for wrap in wraps
    )


@cached_per_source
def _wrapping_calls(source: CellSource, name: str) -> list[ast.Call]:
    """Return the calls that wrap the model of this name in DDP."""
    made = [each for each in source.values(name) if isinstance(each, ast.Call)]
    return [each for each in made if source.kind_of_call(each) == "ddp"]


@cached_per_source
def _may_be_in_join(source: CellSource, node: ast.AST, depth: int = 3) -> bool:
    """Return whether a ``Join`` may cover a node, so that finished ranks still take part.

    A ``Join`` around the node or around a call of its function counts. A ``Join`` that is created
    outside of a ``with`` statement counts too, because it may be entered anywhere.
    """
    joins = _join_statements(source)
    if not joins or None in joins:
        return bool(joins)
    if not joins.isdisjoint(source.ancestors(node)):
        return True
    function = source.function(node)
    if isinstance(function, ast.Module) or not depth:
        return False
    return any(_may_be_in_join(source, each, depth - 1) for each in source.calls_of(function.name))


@cached_per_source
def _join_statements(source: CellSource) -> set[ast.AST | None]:
    """Return the ``with`` statements of each ``Join``, and None for a ``Join`` without one."""
    found: set[ast.AST | None] = set()
    for call in source.calls_of("Join") + source.calls_of("join"):
        items = [each for each in source.ancestors(call) if isinstance(each, ast.withitem)]
        is_of_model = source.is_ddp(source.owner(call)) or (items and not call.args)
        is_join = source.method(call) == "Join" or is_of_model
        if is_join and argument_text(call, "enable") != "False":
            found.add(source.parents[items[0]] if items else None)
    return found


def _all_branches_call(source: CellSource, condition: RankCondition, name: str) -> bool:
    node = condition.node
    return isinstance(node, ast.If) and all(
        any(
            isinstance(call.func, ast.Name) and call.func.id == name
            for statement in branch
            for call in source.calls_inside(statement)
        )
        for branch in (node.body, node.orelse)
    )


def is_without_gradients(source: CellSource, call: ast.Call) -> bool:
    """Return whether a call is under ``no_grad`` or similar: DDP averages no gradients there."""
    for outer in source.ancestors(call):
        if isinstance(outer, ast.With | ast.AsyncWith):
            entered = " ".join(ast.unparse(each.context_expr) for each in outer.items)
            if "no_grad" in entered or "inference_mode" in entered:
                return True
        if isinstance(outer, ast.FunctionDef):
            return any(
                "grad" in ast.unparse(e) or "infer" in ast.unparse(e) for e in outer.decorator_list
            )
    return False
