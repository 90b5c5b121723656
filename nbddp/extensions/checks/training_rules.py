"""Rules about the training step: gradients, the scaler, the wrapper."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nbddp.extensions.checks.conditions import are_exclusive
from nbddp.extensions.checks.registry import Hit, rule
from nbddp.extensions.checks.source import CellSource, cached_per_source
from nbddp.record.heal.cell_syntax import last_name, plain_names


def backward_calls(source: CellSource) -> list[ast.Call]:
    """Return every call of a method ``backward()``."""
    return [each for each in source.calls_of("backward") if isinstance(each.func, ast.Attribute)]


@cached_per_source
def training_loops(source: CellSource) -> set[ast.AST]:
    """Return the innermost loops that contain a ``backward()``."""
    return {loop for each in backward_calls(source) for loop in source.loops(each)[:1]}


def _updates(source: CellSource, call: ast.Call) -> bool:
    """Return whether a call is the ``step()`` of an optimizer."""
    name = source.owner(call)
    is_optimizer = source.kinds.get(name) == "optimizer" or "optim" in name.lower() or name == "opt"
    return is_optimizer and source.method(call) == "step"


def _micro_step_condition(source: CellSource, backward: ast.Call) -> tuple[ast.If, str] | None:
    """Return the ``if i % K == 0`` around all steps in the loop of a backward, and K."""
    loop = next(iter(source.loops(backward)), None)
    calls = source.calls_inside(loop) if loop else ()
    found = [_modulo_condition(source, loop, each) for each in calls if _updates(source, each)]
    return found[0] if found and all(found) else None


def _modulo_condition(
    source: CellSource, loop: ast.AST | None, step: ast.Call
) -> tuple[ast.If, str] | None:
    for outer in source.ancestors(step):
        if outer is loop:
            break
        if isinstance(outer, ast.If) and not _steps_in_both(outer):
            for node in ast.walk(outer.test):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                    return outer, ast.unparse(node.right)
    return None


def _steps_in_both(condition: ast.If) -> bool:
    """Return whether both branches call a ``step()``, such as those of two optimizers."""
    return all(
        any(isinstance(each, ast.Attribute) and each.attr == "step" for each in ast.walk(branch))
        for branch in (ast.Module(condition.body, []), ast.Module(condition.orelse, []))
    )


def _contains(outer: ast.AST, inner: ast.AST) -> bool:
    return inner in ast.walk(outer)


@rule("ND121")
def _undivided_loss(source: CellSource) -> Iterator[Hit]:
    imported = " ".join(source.aliases.values())
    if "accelerate" in imported or "deepspeed" in imported:
        return
    for call in backward_calls(source):
        found = _micro_step_condition(source, call)
        if not found or found[1] == "1" or _contains(found[0], call):
            continue
        loop = source.loops(call)[0]
        divides = any(
            isinstance(node, ast.Div) or (isinstance(node, ast.Attribute) and "div" in node.attr)
            for statement in loop.body
            if statement.lineno <= call.lineno or _contains(statement, call)
            for node in ast.walk(statement)
        )
        if not divides:
            sums = f"backward() adds up {found[1]} micro-steps before the update"
            yield call, f"{sums}, but the loss is not divided."


def _scaler_calls(source: CellSource) -> dict[str, list[ast.Call]]:
    """Return the method calls of each GradScaler that scales a loss, by its name."""
    owners = {source.owner(each) for each in source.calls_of("scale")}
    names = [each for each in owners if source.kinds.get(each) == "scaler" or "scaler" in each]
    return {
        name: [each for each in source.calls if source.owner(each) == name]
        for name in sorted(names)
    }


@rule("ND123")
def _clips_scaled_gradients(source: CellSource) -> Iterator[Hit]:
    clips = source.calls_of("clip_grad_norm_") + source.calls_of("clip_grad_value_")
    for name, calls in _scaler_calls(source).items():
        unscaled = {source.function(each) for each in calls if source.method(each) == "unscale_"}
        for clip in clips:
            function = source.function(clip)
            if function not in unscaled and _is_scaled(source, clip, name):
                yield clip, f"the gradients are clipped before {name} has unscaled them."


def _is_scaled(source: CellSource, clip: ast.Call, name: str) -> bool:
    """Return whether one path through the function has the clipping and the scaler's calls."""
    here = source.calls_in(source.function(clip))
    scaler_calls = [each for each in here if source.owner(each) == name]
    methods = {
        source.method(call) for call in scaler_calls if not are_exclusive(source, clip, call)
    }
    return "scale" in methods and (
        "step" in methods or "step" not in map(source.method, scaler_calls)
    )


@rule("ND124")
def _incomplete_scaler_calls(source: CellSource) -> Iterator[Hit]:
    for name, calls in _scaler_calls(source).items():
        methods = {*map(source.method, calls)}
        if not source.is_cell and any(
            isinstance(given, ast.Name) and given.id == name
            for call in source.calls
            if source.owner(call) != name
            for given in call.args
        ):
            continue  # another function gets the scaler and may call the rest
        scaled = next(each for each in calls if source.method(each) == "scale")
        steps = [each for each in source.calls_of("step") if _updates(source, each)]
        if not methods & {"step", "unscale_"} and steps:
            yield scaled, f"{name} scales the loss, but the optimizer's own step() is called."
        elif "step" in methods and "update" not in methods and any(map(source.loops, calls)):
            yield scaled, f"{name}.update() is never called: its scale stays at its first value."


@rule("ND125")
def _bypasses_ddp(source: CellSource) -> Iterator[Hit]:
    for call in source.calls:
        name = source.owner(call)
        if source.method(call) != "module" or not source.is_ddp(name):
            continue
        is_input = any(last_name(each) == "backward" for each in source.ancestors(call))
        if is_input or _reaches_backward(source, call):
            effect = "these gradients are not averaged over ranks"
            yield call, f"{name}.module(...) bypasses DDP, and backward() follows: {effect}."


def _reaches_backward(source: CellSource, call: ast.Call) -> bool:
    """Return whether backward() follows in the function on a value computed from the result."""
    function = source.function(call)
    names: set[str] = set()
    for node in source.nodes_of(ast.Assign):
        is_of_it = _contains(node.value, call) or plain_names(node.value) & names
        if is_of_it and source.function(node) is function:
            names.update(*map(plain_names, node.targets))
    return any(
        source.function(backward) is function and names & plain_names(backward.func)
        for backward in backward_calls(source)
    )


@rule("ND126")
def _data_parallel_in_rank(source: CellSource) -> Iterator[Hit]:
    for call in source.calls:
        name = source.called_name(call)
        if not (name.startswith("torch.nn.") and name.endswith(".DataParallel")):
            continue
        is_chosen = any(isinstance(each, ast.If | ast.IfExp) for each in source.ancestors(call))
        if not is_chosen and (source.is_cell or source.is_distributed):
            yield call, "DataParallel in a rank uses threads, not processes."


@rule("ND127")
def _sync_batch_norm_after_ddp(source: CellSource) -> Iterator[Hit]:
    for call in source.calls_of("convert_sync_batchnorm"):
        given = call.args[0] if call.args else None
        made = isinstance(given, ast.Call) and source.kind_of_call(given) == "ddp"
        if made or (isinstance(given, ast.Name) and _was_wrapped(source, given.id, call)):
            yield call, "SyncBatchNorm is put into a model that is already wrapped in DDP."


def _was_wrapped(source: CellSource, name: str, call: ast.Call) -> bool:
    before = [
        source.kind_of_call(node.value) if isinstance(node.value, ast.Call) else ""
        for node in source.nodes_of(ast.Assign)
        if node.lineno < call.lineno
        and source.function(node) is source.function(call)
        and any(isinstance(each, ast.Name) and each.id == name for each in node.targets)
        and not any(isinstance(each, ast.If) for each in source.ancestors(node))
    ]
    return bool(before) and before[-1] == "ddp"
