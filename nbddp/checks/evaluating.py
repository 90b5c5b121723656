"""Rules about evaluation: what is switched off for it, and whose numbers are reported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from nbddp.checks.collective_calls import COLLECTIVES
from nbddp.checks.feeding import is_dealt_out
from nbddp.checks.forwards import is_without_gradients
from nbddp.checks.rule import Found, Rule
from nbddp.checks.source import Function, Loop, Source
from nbddp.checks.syntax import names_in
from nbddp.checks.training import training_loops

NOTEBOOK = "02_from_one_process_to_ddp.ipynb"
_GATHERS = re.compile(
    r"(?i)reduce|gather|synchroni[sz]e|meter|metric|all_|sync|broadcast|accelerat|evaluator"
)


def _with_gradients(source: Source) -> Iterator[Found]:
    for switch in source.calls_of("eval"):
        if switch.args or not source.owner(switch):
            continue
        model, function = source.owner(switch), source.function(switch)
        if _is_trained_in(source, function) or _turns_gradients_off(source, function):
            continue
        for call in source.calls_in(function):
            is_model = isinstance(call.func, ast.Name) and call.func.id == model
            if is_model and call.lineno > switch.lineno and source.loops(call):
                yield Found(
                    source.line(call), f"{model}() is evaluated with gradients: no no_grad()."
                )
                return


def _is_trained_in(source: Source, function: Function | ast.Module) -> bool:
    return any(
        source.method(each) in ("backward", "step", "grad") for each in source.calls_in(function)
    )


def _turns_gradients_off(source: Source, function: Function | ast.Module) -> bool:
    """Whether anything here may have done so: by name, around a call of the function too."""
    if isinstance(function, ast.Module):
        return "grad" in source.text or "inference" in source.text
    return source.once(("gradients off", function), lambda: _has_gradients_off(source, function))


def _has_gradients_off(source: Source, function: Function) -> bool:
    text = ast.unparse(function)
    if re.search(r"no_grad|inference_mode|set_grad_enabled|requires_grad|\.detach", text):
        return True
    return any(is_without_gradients(source, each) for each in source.calls_of(function.name))


WITH_GRADIENTS = Rule(
    id="ND131",
    title="an evaluation that keeps gradients",
    why="Each forward pass then keeps all that backward would need: memory and time for nothing.",
    fix="Put the loop under `with torch.no_grad():`.",
    notebook=NOTEBOOK,
    find=_with_gradients,
    bad=Source("model.eval()\nfor x, y in test:\n    right += (model(x).argmax(1) == y).sum()\n"),
    good=Source(
        "model.eval()\nwith torch.no_grad():\n"
        "    for x, y in test:\n        right += (model(x).argmax(1) == y).sum()\n"
    ),
)


def _in_training_mode(source: Source) -> Iterator[Found]:
    trainers = {name for name, kind in source.kinds.items() if kind.endswith(" in training")}
    if "eval(" in source.text or ".train(" in source.text:
        return
    for call in source.calls:
        name = call.func.id if isinstance(call.func, ast.Name) else source.owner(call)
        if name not in trainers or source.method(call) not in (name, "module"):
            continue
        if source.loops(call) and _is_under_no_grad(source, call):
            yield Found(
                source.line(call),
                f"{name} is evaluated in training mode: its dropout, or batch norm, is at work.",
            )
            return


def _is_under_no_grad(source: Source, call: ast.Call) -> bool:
    return any(
        isinstance(each, ast.With)
        and any(
            source.dotted(item.context_expr.func) in ("torch.no_grad", "torch.inference_mode")
            for item in each.items
            if isinstance(item.context_expr, ast.Call)
        )
        for each in source.above(call)
    )


IN_TRAINING_MODE = Rule(
    id="ND132",
    title="an evaluation in training mode",
    why="Dropout leaves features out, and batch norm uses the batch at hand and changes its own "
    "statistics, on each rank by another part of the test.",
    fix="Call `model.eval()` before, and `model.train()` after it.",
    notebook=NOTEBOOK,
    find=_in_training_mode,
    bad=Source(
        "with torch.no_grad():\n    for x, y in test:\n        seen += model(x).sum()\n",
        {"model": "module in training"},
    ),
    good=Source(
        "model.eval()\nwith torch.no_grad():\n"
        "    for x, y in test:\n        seen += model(x).sum()\n",
        {"model": "module in training"},
    ),
)


def _counts(source: Source) -> Iterator[tuple[str, ast.For, ast.AugAssign]]:
    """What is added up in a loop over a loader that is dealt out, while nothing is trained."""
    training = training_loops(source)
    for node in source.every(ast.AugAssign):
        if not isinstance(node.target, ast.Name):
            continue
        loops = source.loops(node)
        if not loops or not isinstance(loops[0], ast.For):
            continue
        names = [each.id for each in ast.walk(loops[0].iter) if isinstance(each, ast.Name)]
        if loops[0] not in training and any(
            is_dealt_out(source, each, shuffled=False) for each in names
        ):
            yield node.target.id, loops[0], node


def _of_one_rank(source: Source) -> Iterator[Found]:
    if _puts_together(source):
        return
    for name, loop, added in _counts(source):
        if not re.search(r"(?i)right|correct|total|acc|hits|loss|seen", name):
            continue
        function = source.function(loop)
        for call in source.calls_in(function):
            is_after = call.lineno > max(loop.lineno, added.lineno)
            is_here = name in names_in(call)
            is_here = is_here and "rank" not in ast.unparse(call)  # else it says whose it is
            if _reports(source, call) and is_after and is_here:
                yield Found(
                    source.line(call),
                    f"{name} is reported as one rank has counted it, of its own share.",
                )
                return


def _reports(source: Source, call: ast.Call) -> bool:
    return source.called(call) in ("print", "nbddp.log") or (
        source.method(call) in ("add_scalar", "log")
    )


def _puts_together(source: Source) -> bool:
    """Whether anything here may add up the ranks' numbers, also by a function from elsewhere."""
    return any(
        source.called(each) in COLLECTIVES or _GATHERS.search(source.called(each) or "")
        for each in source.calls
    ) or any(_GATHERS.search(each.name) for each in source.functions())


OF_ONE_RANK = Rule(
    id="ND133",
    title="one rank's count reported as the whole",
    why="With a DistributedSampler each rank tests its own share: its accuracy is that of a part.",
    fix="Add the counts up first: `right, seen = nbddp.all_reduce([right, seen])`, on all ranks.",
    notebook=NOTEBOOK,
    find=_of_one_rank,
    bad=Source(
        "right = 0\nfor x, y in test:\n    right += (model(x).argmax(1) == y).sum().item()\n"
        "print(right / 1797)\n",
        {"test": "loader dealt"},
    ),
    good=Source(
        "right = 0\nfor x, y in test:\n    right += (model(x).argmax(1) == y).sum().item()\n"
        "right = nbddp.all_reduce(right)\nprint(right / 1797)\n",
        {"test": "loader dealt"},
    ),
)


def _mean_of_means(source: Source) -> Iterator[Found]:
    added = {name: node for name, _loop, node in _counts(source) if _is_of_batch(node)}
    for node in source.every(ast.BinOp) if added else ():
        if not isinstance(node.op, ast.Div):
            continue
        name = node.left.id if isinstance(node.left, ast.Name) else ""
        loops = source.loops(added[name]) if name in added else []
        if loops and _is_its_length(node.right, loops[0]) and _is_reduced(source, node):
            yield Found(
                source.line(node),
                f"{name} adds up means of batches; `/ {ast.unparse(node.right)}` gives the last, "
                "smaller batch the weight of a whole one.",
            )


def _is_its_length(divisor: ast.expr, loop: Loop) -> bool:
    """Whether it is ``len()`` of what the loop goes through."""
    if not isinstance(divisor, ast.Call) or ast.unparse(divisor.func) != "len" or not divisor.args:
        return False
    return isinstance(loop, ast.For) and ast.unparse(divisor.args[0]) in ast.unparse(loop.iter)


def _is_of_batch(node: ast.AugAssign) -> bool:
    """Whether a loss is added as it is, and not times the samples it is of."""
    text = ast.unparse(node.value)
    is_loss = "loss" in f"{ast.unparse(node.target)} {text}"
    return is_loss and "*" not in text and "len(" not in text


def _is_reduced(source: Source, node: ast.AST) -> bool:
    """Whether the mean goes straight to the other ranks."""
    outer = source.parents.get(node)
    if isinstance(outer, ast.Call):
        return bool(re.search(r"all_reduce|reduce_mean|tensor", source.called(outer)))
    if not isinstance(outer, ast.Assign) or not isinstance(outer.targets[0], ast.Name):
        return False
    name = outer.targets[0].id
    return any(
        "reduce" in source.called(each) and name in names_in(each) and each.lineno >= outer.lineno
        for each in source.calls
    )


MEAN_OF_MEANS = Rule(
    id="ND134",
    title="a mean of means",
    why="Batches, and shares, are not all of one size: the mean of their means is not the mean.",
    fix="Add up `loss.item() * len(x)` and the samples, all_reduce both, and divide once.",
    notebook=NOTEBOOK,
    find=_mean_of_means,
    bad=Source(
        "total = 0.0\nfor x, y in test:\n    total += loss_of(model(x), y).item()\n"
        "mean = nbddp.all_reduce(total / len(test), 'mean')\n",
        {"test": "loader dealt"},
    ),
    good=Source(
        "total, seen = 0.0, 0\nfor x, y in test:\n"
        "    total += loss_of(model(x), y).item() * len(x)\n    seen += len(x)\n"
        "total, seen = nbddp.all_reduce([total, seen])\nmean = total / seen\n",
        {"test": "loader dealt"},
    ),
)

RULES: tuple[Rule[Source], ...] = (WITH_GRADIENTS, IN_TRAINING_MODE, OF_ONE_RANK, MEAN_OF_MEANS)
