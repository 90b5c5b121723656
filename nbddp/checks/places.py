"""Rules about files and devices that ranks share."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import partial

from nbddp.checks.collective_calls import collective
from nbddp.checks.conditions import depends_on_rank, guards, is_called_guarded, is_guarded
from nbddp.checks.rule import Found, Rule
from nbddp.checks.source import Source
from nbddp.checks.syntax import argument, names_in

SAVES = "04_checkpoint_and_resume.ipynb"
DEVICES = "02_from_one_process_to_ddp.ipynb"
_OWN = re.compile(r"(?i)rank|local|uuid|getpid|tempfile|buffer|bytesio|/dev/null")


def _saves(source: Source) -> Iterator[tuple[ast.Call, ast.expr]]:
    for call in source.calls:
        path = argument(call, "f", 1)
        if source.called(call) == "torch.save" and path is not None:
            yield call, path


def _one_file(source: Source) -> Iterator[Found]:
    if not (source.is_distributed or _meets(source)) or _has_helper(source):
        return
    for call, path in _saves(source):
        if not is_called_guarded(source, call) and not _is_own(source, path):
            yield Found(
                source.line(call), f"every rank writes {ast.unparse(path)}, all at the same time."
            )


def _meets(source: Source) -> bool:
    return any(collective(source, each) for each in source.calls)


def _has_helper(source: Source) -> bool:
    """Whether printing or saving is arranged for elsewhere, as some scripts do."""
    return any(
        re.search(r"(?i)accelerat|lightning|deepspeed|fabric|master_only|rank_zero|fsdp", each)
        for each in source.aliases.values()
    )


def _is_own(source: Source, path: ast.expr, depth: int = 3) -> bool:
    """Whether the rank, or something else of its own, is in the path."""
    if depends_on_rank(path) or _OWN.search(ast.unparse(path)):
        return True
    if source.is_cell and not _is_known(source, path):
        return True  # another cell has made it, perhaps with the rank in it
    function = source.function(path)
    parameters = (
        {each.arg for each in function.args.args}
        if isinstance(function, ast.FunctionDef)
        else set()
    )
    if parameters & {each.id for each in ast.walk(path) if isinstance(each, ast.Name)}:
        return True  # whoever calls it knows
    return depth > 0 and any(
        source.once(("own", name, depth), partial(_is_own_name, source, name, depth))
        for name in names_in(path)
    )


def _is_own_name(source: Source, name: str, depth: int) -> bool:
    """Whether anything that the name is given has something of the rank's own in it."""
    return any(_is_own(source, each, depth - 1) for each in source.values(name))


def _is_known(source: Source, path: ast.AST) -> bool:
    """Whether all plain names in it are given a value here, by ``=`` or by a loop."""
    names = {each.id for each in ast.walk(path) if isinstance(each, ast.Name)}
    return all(
        name in source.aliases or name in vars(builtins) or name in source.assigned
        for name in names
    )


ONE_FILE = Rule(
    id="ND141",
    title="every rank saves to one path",
    why="Two that write one file at the same time leave one that nobody can read.",
    fix="Save under `if rank == 0:`, or have `nbddp.Checkpoint(folder).save(...)` do it.",
    notebook=SAVES,
    find=_one_file,
    bad=Source("torch.save(model.module.state_dict(), 'model.pt')\n", {"model": "ddp"}),
    good=Source(
        "if rank == 0:\n    torch.save(model.module.state_dict(), 'model.pt')\n", {"model": "ddp"}
    ),
)


def _read_too_early(source: Source) -> Iterator[Found]:
    for call, path in _saves(source):
        if not is_guarded(source, call):
            continue
        function, said = source.function(call), ast.dump(path)
        for load in source.calls_in(function):
            given = argument(load, "f", 0)
            is_load = source.called(load) == "torch.load" and given is not None
            if not is_load or ast.dump(given or path) != said or is_guarded(source, load):
                continue
            if load.lineno > call.lineno and not _waits_between(source, call, load):
                yield Found(
                    source.line(load),
                    f"the others read {ast.unparse(path)} while one rank may still be writing it "
                    f"(line {source.line(call)}).",
                )


def _waits_between(source: Source, first: ast.Call, last: ast.Call) -> bool:
    """Whether there is anything between them that may have the ranks wait, or one leave."""
    if source.loops(first) != source.loops(last) or not _same_block(source, first, last):
        return True
    return any(
        first.lineno < each.lineno < last.lineno and not source.called(each).startswith("print")
        for each in source.calls_in(source.function(first))
        if collective(source, each)
        or source.called(each).split(".")[0] not in ("time", "torch", "print")
    )


def _same_block(source: Source, first: ast.Call, last: ast.Call) -> bool:
    def outermost(call: ast.Call) -> list[ast.AST]:
        return [each for each in source.above(call) if isinstance(each, ast.If)]

    return len(outermost(first)) == 1 and not outermost(last)


READ_TOO_EARLY = Rule(
    id="ND142",
    title="a file that is read while one rank may be writing it",
    why="Only the rank that writes knows when it is done. Sleeping hides that on a good day.",
    fix="Put `dist.barrier()` between the two, on all ranks.",
    notebook=SAVES,
    find=_read_too_early,
    bad=Source(
        "import time\nif rank == 0:\n    torch.save(state, 'start.pt')\ntime.sleep(1)\n"
        "state = torch.load('start.pt')\n"
    ),
    good=Source(
        "if rank == 0:\n    torch.save(state, 'start.pt')\ndist.barrier()\n"
        "state = torch.load('start.pt')\n"
    ),
)


def _first_gpu(source: Source) -> Iterator[Found]:
    if not source.is_cell and not source.is_distributed:
        return
    if re.search(r"CUDA_VISIBLE_DEVICES", source.text):
        return
    for call in source.calls:
        given = _device_of(source, call)
        if given is None or is_called_guarded(source, call) or _is_chosen(source, call):
            continue
        yield Found(source.line(call), f"{ast.unparse(given)} is the first GPU, for every rank.")


def _device_of(source: Source, call: ast.Call) -> ast.expr | None:
    """The first GPU by name or number, where a call puts something there."""
    name, method = source.called(call), source.method(call)
    places = list(call.args) + [each.value for each in call.keywords if each.arg == "device"]
    if name == "torch.device" or method == "to":
        return next((each for each in places if _is_first(each)), None)
    if method == "cuda" or name == "torch.cuda.set_device":
        return next(
            (
                each
                for each in places
                if isinstance(each, ast.Constant)
                and each.value in (0, "cuda:0")
                and each.value is not False
            ),
            None,
        )
    return None


def _is_first(node: ast.AST) -> bool:
    if isinstance(node, ast.IfExp):
        return _is_first(node.body)
    return isinstance(node, ast.Constant) and node.value == "cuda:0"


def _is_chosen(source: Source, call: ast.Call) -> bool:
    """Whether it is under a condition that may ask whether there are several ranks at all."""
    inner: ast.AST = call
    for outer in source.above(call):
        if isinstance(outer, ast.If | ast.IfExp) and inner is not outer.test:
            text = ast.unparse(outer.test)
            if guards(outer.test) or not re.search(r"^\(?torch\.cuda\.is_available\(\)\)?$", text):
                return True
        inner = outer
    return False


FIRST_GPU = Rule(
    id="ND143",
    title="the first GPU on every rank",
    why="All ranks then share one GPU and its memory, and NCCL refuses two ranks on one GPU.",
    fix="Use the cell's `device`, or `torch.device('cuda', local_rank)`.",
    notebook=DEVICES,
    find=_first_gpu,
    bad=Source("model = net.to('cuda:0')\n"),
    good=Source("model = net.to(device)\n"),
)


def _before_meeting(source: Source) -> Iterator[Found]:
    starts = [
        each
        for each in source.calls
        if source.called(each) == "torch.distributed.init_process_group"
        and not any(isinstance(outer, ast.If) for outer in source.above(each))
    ]
    for start in starts[:1]:
        function = source.function(start)
        for call in source.calls:
            is_work = source.method(call) == "cuda" and not call.args and not call.keywords
            is_before = call.lineno < start.lineno and source.function(call) is function
            if is_work and is_before and not _has_device(source, call):
                yield Found(
                    source.line(call),
                    "cuda() comes before init_process_group and set_device: it is GPU 0 on every "
                    "rank.",
                )
                return


def _has_device(source: Source, call: ast.Call) -> bool:
    """Whether the rank's GPU was chosen, by then or in a way that cannot be seen."""
    return (
        "set_device" in source.text
        or "CUDA_VISIBLE_DEVICES" in source.text
        or any(
            isinstance(each, ast.With) and "device" in ast.unparse(each.items[0].context_expr)
            for each in source.above(call)
        )
    )


BEFORE_MEETING = Rule(
    id="ND144",
    title="work on a GPU before the process group",
    why="Until set_device is called `cuda` is GPU 0: each rank makes a context there, and NCCL may "
    "take it for the rank's own.",
    fix="First `torch.cuda.set_device(local_rank)`, then init_process_group, then work.",
    notebook=DEVICES,
    find=_before_meeting,
    bad=Source("model = net.cuda()\ndist.init_process_group('nccl')\n"),
    good=Source(
        "torch.cuda.set_device(local_rank)\ndist.init_process_group('nccl')\nmodel = net.cuda()\n"
    ),
)

RULES: tuple[Rule[Source], ...] = (ONE_FILE, READ_TOO_EARLY, FIRST_GPU, BEFORE_MEETING)
